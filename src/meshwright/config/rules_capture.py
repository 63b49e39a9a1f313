"""Rules of the `[capture]` section: what CUDA graphs go together with."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.config.schema import RunConfig
from meshwright.errors import ConfigError
from meshwright.settings.violation import Fix, Violation, format_value

SCOPE = "capture.scope"
OFF: Fix = {SCOPE: ()}


def capture_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield violations of the rules for `[capture]`."""
    capture, mesh = config.capture, config.mesh
    if not capture.scope:
        return
    found = f"{SCOPE} = {format_value(capture.scope)}"
    for axis in ("tp", "cp"):
        if getattr(mesh, axis) > 1:
            yield Violation(
                ConfigError,
                f"{found} with mesh.{axis} = {getattr(mesh, axis)}",
                SCOPE,
                f"a graph moves no bytes between ranks, as the layers of a block do over {axis}",
                [OFF, {f"mesh.{axis}": 1}],
            )
    if config.train.compile:
        yield Violation(
            ConfigError,
            f"{found} with train.compile",
            SCOPE,
            "captured layers run uncompiled",
            [OFF, {"train.compile": False}],
        )
    recomputes = config.recompute.policy != "none" or bool(config.recompute.blocks)
    if recomputes and capture.scope != ("layer",):
        yield Violation(
            ConfigError,
            f"{found} with recomputation",
            SCOPE,
            "a recomputed block is captured as a whole: a part of it would be replayed twice",
            [{SCOPE: ("layer",)}, {"recompute.policy": "none", "recompute.blocks": ()}, OFF],
        )
    if "moe_preprocess" in capture.scope:
        others = tuple(one for one in capture.scope if one != "moe_preprocess")
        yield Violation(
            ConfigError,
            found,
            SCOPE,
            "rows are sorted and counted within the scope moe, which a graph can run unless it waits for the device",
            [{SCOPE: (*others, "moe_router")}],
        )
    if capture.backend == "cuda" and config.train.device == "cpu":
        yield Violation(
            ConfigError,
            "capture.backend = cuda with train.device = cpu",
            "capture.backend",
            "graphs are captured on a CUDA device",
            [{"capture.backend": "simulate"}, {"train.device": "cuda"}],
        )
