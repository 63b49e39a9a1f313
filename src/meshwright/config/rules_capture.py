"""Rules of the `[capture]` section: what CUDA graphs go together with."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from fnmatch import fnmatchcase

from meshwright.config.facts_for_family import model_facts
from meshwright.config.schema import RunConfig
from meshwright.errors import ConfigError
from meshwright.settings.violation import Fix, Violation, format_value

SCOPE = "capture.scope"
NAMES = ("layer", "attention", "mlp", "moe_router", "moe")
REGION = "region:"
UNAVAILABLE = {
    "moe_preprocess": "rows are sorted and counted within the scope moe, which a graph can run unless it waits for the "
    "device",
    "chunk": "FSDP2 gathers the weights of one block at a time, and models build masks on the host before their "
    "blocks; layer captures all blocks, with a launch for each",
    "full_step": "reductions, transfers and the loss run between graphs; layer captures all blocks, with a launch for "
    "each",
}
"""Scopes that other frameworks have, and why there are none of that name."""
OFF: Fix = {SCOPE: ()}


def capture_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield violations of the rules for `[capture]`."""
    capture, mesh = config.capture, config.mesh
    if not capture.scope:
        return
    found = f"{SCOPE} = {format_value(capture.scope)}"
    yield from _unknown_scopes(config)
    for axis in ("tp", "cp"):
        if getattr(mesh, axis) > 1:
            yield Violation(
                ConfigError,
                f"{found} with mesh.{axis} = {getattr(mesh, axis)}",
                SCOPE,
                f"a graph moves no bytes between ranks, as the layers of a block do over {axis}",
                [OFF, {f"mesh.{axis}": 1}],
            )
    if config.train.compile and capture.backend == "simulate":
        yield Violation(
            ConfigError,
            f"{found} with train.compile and capture.backend = simulate",
            "capture.backend",
            "the simulation runs a block's operators one by one",
            [{"capture.backend": "eager"}, {"train.compile": False}, OFF],
        )
    reasons = {
        "train.compile": ("compiled", config.train.compile),
        "recomputation": ("recomputed", config.recompute.policy != "none" or bool(config.recompute.blocks)),
    }
    for what, (how, is_so) in reasons.items():
        if is_so and capture.scope != ("layer",):
            undone: Fix = (
                {"train.compile": False} if how == "compiled" else {"recompute.policy": "none", "recompute.blocks": ()}
            )
            yield Violation(
                ConfigError,
                f"{found} with {what}",
                SCOPE,
                f"a {how} block is captured as a whole",
                [{SCOPE: ("layer",)}, undone, OFF],
            )
    if capture.backend == "cuda" and config.train.device == "cpu":
        yield Violation(
            ConfigError,
            "capture.backend = cuda with train.device = cpu",
            "capture.backend",
            "graphs are captured on a CUDA device",
            [{"capture.backend": "simulate"}, {"train.device": "cuda"}],
        )


def _unknown_scopes(config: RunConfig) -> Iterator[Violation]:
    """Yield a violation for each scope that is neither a name, a region, nor a module with parameters of a block."""
    parameters = {p.name for kind in model_facts(config).kinds for p in kind.parameters}
    modules = {name.rsplit(".", depth)[0] for name in parameters for depth in range(1, name.count(".") + 1)}
    for scope in config.capture.scope:
        if scope in NAMES or scope.startswith(REGION) or any(fnmatchcase(name, scope) for name in modules):
            continue
        near = difflib.get_close_matches(scope, (*NAMES, *modules), n=1) or ["layer"]
        others = tuple(one for one in config.capture.scope if one != scope)
        rule = f"scopes are {', '.join(NAMES)}, globs over the names of a block's modules, and {REGION}NAME"
        yield Violation(
            ConfigError,
            f"{SCOPE} has {scope}, which is no module of a block",
            SCOPE,
            UNAVAILABLE.get(scope, rule),
            [{SCOPE: (*others, near[0])}],
        )
