"""Verify float8 layers: which they are, their sizes, and what their recipe allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from meshwright.nn.float8.recipe import SIZE_UNIT, Float8Recipe
from meshwright.plan.run_plan import Float8Layers, Kind, RunPlan
from meshwright.plan.verify.names import Fault, format_count, join_names, qualified_name
from meshwright.units import counted

MATRIX = "matrix"
"""Role of a linear layer's weight."""


def float8_faults(plan: RunPlan) -> Iterator[Fault]:
    """Yield faults of float8 layers."""
    lengths = {kind.float8.history for kind in plan.kinds if kind.float8 is not None and kind.float8.history}
    for kind in plan.kinds:
        if kind.float8 is not None:
            yield from _layers(kind, kind.float8)
            yield from _recipe(plan, kind, kind.float8)
            yield from _shards(plan, kind, kind.float8)
            yield from _weights(plan, kind, kind.float8)
            if len(lengths) > 1 and kind.float8.history == max(lengths):
                what = f"amax histories of {', '.join(map(str, sorted(lengths)))} steps"
                rule = "the histories of all layers are one tensor"
                yield Fault(what, rule, f"kinds[{kind.name}].float8.history")
    tokens = plan.batch.samples * plan.rank_tokens
    if tokens % SIZE_UNIT and any(kind.float8 is not None for kind in plan.kinds):
        what = f"a micro-batch of a rank has {counted(tokens, 'token')}"
        yield Fault(what, f"float8 layers take a multiple of {SIZE_UNIT} tokens", "batch")


def _layers(kind: Kind, float8: Float8Layers) -> Iterator[Fault]:
    field = f"kinds[{kind.name}].float8.layers"
    matrices = {p.name.removesuffix(".weight") for p in kind.parameters if p.role == MATRIX and len(p.shape) == 2}
    if not kind.is_block or not float8.layers:
        what = f"{kind.name} has {len(float8.layers)} float8 layers{'' if kind.is_block else ', but is no block'}"
        yield Fault(what, "only blocks have float8 layers, and at least one", field)
    for path, count in Counter(float8.layers).items():
        if path not in matrices:
            yield Fault(f"{kind.name} has no linear layer {path}", "float8 layers are linear layers of the kind", field)
        if count > 1:
            yield Fault(f"{path} is listed {format_count(count)}", "a layer is listed once", field)


def _recipe(plan: RunPlan, kind: Kind, float8: Float8Layers) -> Iterator[Fault]:
    field, recipe = f"kinds[{kind.name}].float8", float8.recipe
    if (float8.history > 0) is not (recipe is Float8Recipe.DELAYED) or float8.history < 0:
        what = f"{recipe} scaling of {kind.name} with an amax history of {counted(float8.history, 'step')}"
        yield Fault(what, "delayed scaling looks back on at least one step, other scaling on none", f"{field}.history")
    if recipe is Float8Recipe.TORCHAO and float8.cached:
        what = f"cached weights of torchao's layers in {kind.name}"
        yield Fault(what, "torchao's layer casts its weight in every forward and backward", f"{field}.cached")
    for number, stage in enumerate(plan.stages):
        if recipe is Float8Recipe.TORCHAO and stage.splits_backward and kind.name in stage.kinds:
            what = f"torchao's layers in {kind.name}, and a backward that is split"
            rule = "torchao's layers can't defer the gradients of their weights"
            yield Fault(what, rule, f"{field}.recipe", stages=(number,))
    if plan.edge.dtype == "float64":
        yield Fault(f"float8 layers in {kind.name}, which runs in float64", "float8 is for float32 and bfloat16", field)


def _shards(plan: RunPlan, kind: Kind, float8: Float8Layers) -> Iterator[Fault]:
    """Check what layers with tensor-parallel shards can't do."""
    field, biases = f"kinds[{kind.name}].float8", [f"{path}.bias" for path in float8.layers]
    found = [f"the bias {p.name}" for p in kind.parameters if p.name in biases]
    found += ["torchao's layers"] if float8.recipe is Float8Recipe.TORCHAO else []
    found += ["compiled layers"] if kind.compiled else []
    for what in found if plan.mesh.view("tp") else ():
        rule = "float8 layers with tensor-parallel shards are not torchao's, run eagerly, and have no bias"
        yield Fault(f"{what} in {kind.name}, in float8 with tp", rule, field, axis="tp")


def _weights(plan: RunPlan, kind: Kind, float8: Float8Layers) -> Iterator[Fault]:
    for parameter in kind.parameters:
        if parameter.name.removesuffix(".weight") not in float8.layers:
            continue
        name, field = qualified_name(kind, parameter), f"kinds[{kind.name}].float8"
        local = list(parameter.shape)
        for shard in parameter.used:
            local[shard.dim] //= plan.mesh.size(*shard.axes)
        if any(size % SIZE_UNIT for size in local):
            what = f"{name} has shape {local} on a rank"
            rule = f"float8 products take multiples of {SIZE_UNIT}"
            yield Fault(what, rule, f"{field}.layers", parameter=name)
        for shard in parameter.used:
            if shard.axes != plan.mesh.view("tp"):
                what = f"{name} is sharded along dim {shard.dim} over {join_names(shard.axes)} in use"
                rule = "float8 layers multiply whole matrices, or shards over tp"
                yield Fault(what, rule, f"{field}.layers", parameter=name, axis=shard.axes[0])
        sharded = tuple(axis for axis in plan.mesh.view("fsdp") if plan.mesh.size(axis) > 1)
        if float8.cached and sharded:
            what = f"the float8 copy of {name}, which {', '.join(sharded)} shard"
            rule = "a cached weight is whole on every rank"
            yield Fault(what, rule, f"{field}.cached", parameter=name, axis=sharded[0])
