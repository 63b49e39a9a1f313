"""Rules of the keys of `float8`, and the choice of the linear layers that run in float8 and of their scales."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import ClassVar

from meshwright.config.facts_for_family import model_facts
from meshwright.config.schema import RunConfig
from meshwright.errors import ConfigError, LayoutError
from meshwright.features.contract import KindPart
from meshwright.features.float8.section import Float8Config
from meshwright.models.contract.model_facts import KindFacts, ModelFacts
from meshwright.settings.violation import Fix, Violation, format_value, round_up
from meshwright.units import counted

OFF: Fix = {"float8.recipe": "none"}


def recipe_of(config: RunConfig) -> Float8Recipe:
    """Return the recipe of a run's float8 layers: torchao's layer, where it is installed, computes the current scales
    of compiled blocks that it can compute."""
    needs_ours = not config.train.compile or config.mesh.tp > 1 or config.float8.cache_weights
    if config.float8.recipe == "current" and not needs_ours and importlib.util.find_spec("torchao") is not None:
        return Float8Recipe.TORCHAO
    return Float8Recipe(config.float8.recipe)


def layers_in_float8(config: Float8Config, kind: KindFacts, layer: int | None, *, num_layers: int) -> tuple[str, ...]:
    """Return the paths of a block's layers that run in float8; none of an end, where `layer` is None."""
    if config.recipe == "none" or layer is None:
        return ()
    if layer < config.keep_first or layer >= num_layers - config.keep_last:
        return ()
    paths = (path for one in kind.linear_inputs for path in one.layers)
    return tuple(path for path in paths if _matches(config.modules, kind.full_name(path, layer)))


def _matches(globs: tuple[str, ...], name: str) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def float8_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield violations of the rules for `float8`."""
    facts = model_facts(config)
    if config.train.precision == "float64":
        what = f"float8.recipe = {config.float8.recipe} with train.precision = float64"
        rule = "float8 is for training in float32 and bfloat16"
        yield Violation(ConfigError, what, "float8.recipe", rule, [OFF, {"train.precision": "bfloat16"}])
    yield from _layers(config, facts)
    yield from _layout(config, facts)
    yield from _sizes(config, facts)


def _layers(config: RunConfig, facts: ModelFacts) -> Iterator[Violation]:
    """Check that the keys choose some layers, and that every glob matches one."""
    float8, recipe = config.float8, f"float8.recipe = {config.float8.recipe}"
    names = [
        kind.full_name(path, layer)
        for kind, layer in facts.held(range(facts.num_layers), is_first=False, is_last=False)
        if layer is not None
        for one in kind.linear_inputs
        for path in one.layers
    ]
    if not names:
        rule = "float8 is for the linear layers that a family describes in KindFacts.linear_inputs"
        yield Violation(ConfigError, f"{recipe}, but this model describes none", "float8.recipe", rule, [OFF])
        return
    for glob in float8.modules:
        if not any(fnmatchcase(name, glob) for name in names):
            rest = tuple(other for other in float8.modules if other != glob)
            what = f"float8.modules has {glob}, which matches no linear layer of a block"
            rule = f"globs match names such as {names[0]}; embeddings, heads, routers and experts have no float8"
            yield Violation(ConfigError, what, "float8.modules", rule, [{"float8.modules": rest or ("*",)}])
    if float8.keep_first + float8.keep_last >= facts.num_layers:
        what = f"float8.keep_first = {float8.keep_first} and float8.keep_last = {float8.keep_last} keep all blocks"
        key = "float8.keep_first" if float8.keep_first else "float8.keep_last"
        rule = f"a block of the model's {facts.num_layers} has layers in float8"
        yield Violation(ConfigError, what, key, rule, [{"float8.keep_first": 0, "float8.keep_last": 0}, OFF])
    elif not _chosen(config, facts):
        what = f"float8.modules = {format_value(float8.modules)} matches layers of kept blocks only"
        rule = "a block that is not kept has layers in float8"
        yield Violation(ConfigError, what, "float8.modules", rule, [{"float8.modules": ("*",)}, OFF])


def _layout(config: RunConfig, facts: ModelFacts) -> Iterator[Violation]:
    mesh = config.mesh
    for kind, layer, path in _chosen(config, facts) if mesh.tp > 1 else ():
        if any(p.name == f"{path}.bias" for p in kind.parameters):
            what = f"{kind.full_name(path, layer)} has a bias and runs in float8, with mesh.tp = {mesh.tp}"
            rule = "float8 layers with tensor-parallel shards have no bias"
            yield Violation(LayoutError, what, "mesh.tp", rule, [{"mesh.tp": 1}, OFF])
            break
    if config.float8.cache_weights and mesh.dp_shard * mesh.cp > 1:
        axis = "mesh.dp_shard" if mesh.dp_shard > 1 else "mesh.cp"
        rule = "a cached weight is whole on every rank, so dp_shard and cp can't shard parameters; tp can"
        fixes: list[Fix] = [{"float8.cache_weights": False}, {axis: 1}]
        where = f"{axis} = {getattr(mesh, axis.removeprefix('mesh.'))}"
        yield Violation(LayoutError, f"float8.cache_weights with {where}", "float8.cache_weights", rule, fixes)


def _sizes(config: RunConfig, facts: ModelFacts) -> Iterator[Violation]:
    """Check that products have sizes that GPUs multiply in float8, also on a CPU, which would take any."""
    for kind, layer, path in _chosen(config, facts):
        shape = next(p.shape for p in kind.parameters if p.name == f"{path}.weight")
        if any(size % (SIZE_UNIT * config.mesh.tp) for size in shape):
            what = f"{kind.full_name(path, layer)} has {shape[1]} input and {shape[0]} output features"
            rule = f"float8 products take multiples of {SIZE_UNIT}{' × mesh.tp' if config.mesh.tp > 1 else ''}"
            otherwise = f"sizes that are multiples of {SIZE_UNIT}, or float8.modules without this one"
            yield Violation(ConfigError, what, "float8.recipe", rule, [OFF], otherwise)
            return
    train, axes = config.train, config.mesh.axes()
    parts = axes.data_parallel() * train.num_microbatches
    samples = train.global_batch // parts
    tokens = samples * facts.tokens // axes.cp
    if tokens % SIZE_UNIT:
        what = f"a micro-batch of a rank has {samples} × {counted(facts.tokens // axes.cp, 'token')}"
        rule = f"the weight gradient's float8 product takes a multiple of {SIZE_UNIT} tokens"
        more: Fix = {"train.global_batch": round_up(train.global_batch, SIZE_UNIT * parts)}
        yield Violation(LayoutError, what, "train.global_batch", rule, [more, OFF])


def _chosen(config: RunConfig, facts: ModelFacts) -> list[tuple[KindFacts, int, str]]:
    """Return block, layer and path of each linear layer that runs in float8."""
    num_layers = facts.num_layers
    return [
        (kind, layer, path)
        for kind, layer in facts.held(range(num_layers), is_first=False, is_last=False)
        if layer is not None
        for path in layers_in_float8(config.float8, kind, layer, num_layers=num_layers)
    ]


class Float8Recipe(StrEnum):
    """Choice of the scales of a float8 layer."""

    CURRENT = "current"
    """From the tensor that is cast; no state between steps."""
    DELAYED = "delayed"
    """From the largest magnitudes of earlier steps, over all ranks."""
    TORCHAO = "torchao"
    """Current scaling by torchao's layer, for compiled blocks."""


SIZE_UNIT = 16
"""Divisor that float8 products need of features, and of tokens for the weight's gradient."""


@dataclass(frozen=True)
class Float8Layers(KindPart):
    """The linear layers of a kind that run in float8."""

    feature: ClassVar[str] = "float8"

    recipe: Float8Recipe
    layers: tuple[str, ...]
    """Paths of the layers inside the block."""
    history: int = 0
    """Steps that scales look back on; 0 unless they are delayed."""
    cached: bool = False
    """Whether weights are cast once per step instead of in every forward and backward."""
