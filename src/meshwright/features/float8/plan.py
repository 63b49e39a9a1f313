"""Float8 in plans: which layers, what they keep, what is wrong with them, and what proofs do with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from meshwright.config.schema import RunConfig
from meshwright.features.contract import PlanFeature
from meshwright.features.float8.rules import (
    OFF,
    SIZE_UNIT,
    Float8Layers,
    Float8Recipe,
    float8_violations,
    layers_in_float8,
    recipe_of,
)
from meshwright.models.contract.model_facts import KindFacts, ModelFacts, Saved
from meshwright.models.contract.operators import OperatorKind, Rerun
from meshwright.plan.run_plan import BYTES, LayerSpec, PlannedKernels, PlannedOperator, RunPlan, Stage
from meshwright.plan.verify.names import PlanError, format_count, join_names, qualified_name
from meshwright.settings.violation import Fix, Violation
from meshwright.units import counted

MATRIX = "matrix"
"""Role of a linear layer's weight."""
WIDE = 4
"""Bytes of float32."""


class Float8InPlans(PlanFeature[Float8Layers]):
    """Linear layers in float8."""

    part = Float8Layers

    def rules(self, config: RunConfig) -> Iterator[Violation]:
        return float8_violations(config)

    def make(self, config: RunConfig, model: ModelFacts, kind: KindFacts, layer: int | None) -> Float8Layers | None:
        float8 = config.float8
        layers = layers_in_float8(float8, kind, layer, num_layers=model.num_layers)
        if not layers:
            return None
        recipe = recipe_of(config)
        history = float8.amax_history if recipe is Float8Recipe.DELAYED else 0
        return Float8Layers(recipe, layers, history, float8.cache_weights)

    def faults(self, plan: RunPlan) -> Iterator[PlanError]:
        found = {kind.name: part for kind in plan.kinds if (part := kind.part(Float8Layers)) is not None}
        lengths = {part.history for part in found.values() if part.history}
        for name, part in found.items():
            kind = plan.kind(name)
            yield from _layers(kind, part)
            yield from _recipe(plan, kind, part)
            yield from _shards(plan, kind, part)
            yield from _weights(plan, kind, part)
            if len(lengths) > 1 and part.history == max(lengths):
                what = f"amax histories of {', '.join(map(str, sorted(lengths)))} steps"
                rule = "the histories of all layers are one tensor"
                yield PlanError(what, rule, f"kinds[{name}].float8.history")
        tokens = plan.batch.samples * plan.rank_tokens
        if tokens % SIZE_UNIT:
            what = f"a micro-batch of a rank has {counted(tokens, 'token')}"
            yield PlanError(what, f"float8 layers take a multiple of {SIZE_UNIT} tokens", "batch")

    def saved(self, facts: KindFacts, part: Float8Layers, *, tp: int, compiled: bool) -> Iterator[Saved]:
        """Yield what float8 layers change: they save casts of their inputs, and none the original.

        Compiled, layers with the same scale of an input share a cast, and PyTorch's partitioner computes one of an
        input again with what makes it, such as a norm. An attention's output is made by no such operator.
        """
        for one in facts.linear_inputs:
            found = copies = sum(layer in part.layers for layer in one.layers)
            if compiled and not part.history:
                copies = min(copies, 1)
            if compiled and any(vars(one.freed).values()):
                copies = max(copies - 1, 0)
            yield Saved(fixed_bytes=copies * one.width / (tp if one.divided else 1))
            if found == len(one.layers):
                yield Saved(**{name: -value for name, value in vars(one.freed).items()})

    def operators(
        self, facts: KindFacts, part: Float8Layers, operators: tuple[PlannedOperator, ...], *, samples: int
    ) -> tuple[PlannedOperator, ...]:
        """Return what a kind computes if its layers cast what they multiply. They save their casts, which a recomputed
        forward makes again even if it needs no product any more."""
        found: list[PlannedOperator] = []
        for one in operators:
            if one.kind is OperatorKind.PRODUCT and one.name in part.layers:
                readers = next(x.layers for x in facts.linear_inputs if one.name in x.layers)
                first = next(name for name in readers if name in part.layers)
                found.append(_casts(one, part, shares_input=one.name != first and not part.history))
                one = replace(one, rate="float8", rerun=Rerun.FULL)
            found.append(one)
        return tuple(found)

    def weight_bytes(self, plan: RunPlan, stage: Stage) -> int:
        """Return the bytes of weights kept in float8, whole."""
        return sum(
            plan.elements(parameter)
            for kind, _, parameter in plan.parameters(stage)
            if (part := kind.part(Float8Layers)) is not None and part.cached
            if parameter.name.removesuffix(".weight") in part.layers
        )

    def page(self, plan: RunPlan) -> Iterator[tuple[str, ...]]:
        """Yield each kind's float8 layers and their scales; a kind of blocks without any is listed, too."""
        yield ("linear layers in float8",)
        layers = Counter(name for stage in plan.stages for name in stage.kinds)
        for kind in (kind for kind in plan.kinds if kind.is_block):
            part, name = kind.part(Float8Layers), f"{kind.name} × {layers[kind.name]}"
            if part is None:
                yield name, "none"
                continue
            scales = "current scaling by torchao" if part.recipe is Float8Recipe.TORCHAO else f"{part.recipe} scaling"
            eager = "" if kind.compiled else "casts not fused without train.compile"
            back = f"amax over {counted(part.history, 'step')}" if part.history else ""
            cached = "weights cast once per step" if part.cached else ""
            yield tuple(word for word in (name, scales, back, cached, eager, *part.layers) if word)

    def in_proof(self, config: RunConfig) -> Fix:
        return OFF

    def plan_in_proof(self, plan: RunPlan) -> RunPlan:
        return replace(plan, kinds=tuple(kind.without(Float8Layers) for kind in plan.kinds))

    def set_aside(self, config: RunConfig) -> str:
        return f"float8.recipe={config.float8.recipe} is set aside: a proof computes in float64"


def _layers(kind: LayerSpec, float8: Float8Layers) -> Iterator[PlanError]:
    field = f"kinds[{kind.name}].float8.layers"
    matrices = {p.name.removesuffix(".weight") for p in kind.parameters if p.role == MATRIX and len(p.shape) == 2}
    if not kind.is_block or not float8.layers:
        what = f"{kind.name} has {len(float8.layers)} float8 layers{'' if kind.is_block else ', but is no block'}"
        yield PlanError(what, "only blocks have float8 layers, and at least one", field)
    for path, count in Counter(float8.layers).items():
        if path not in matrices:
            yield PlanError(
                f"{kind.name} has no linear layer {path}", "float8 layers are linear layers of the kind", field
            )
        if count > 1:
            yield PlanError(f"{path} is listed {format_count(count)}", "a layer is listed once", field)


def _recipe(plan: RunPlan, kind: LayerSpec, float8: Float8Layers) -> Iterator[PlanError]:
    field, recipe = f"kinds[{kind.name}].float8", float8.recipe
    if (float8.history > 0) is not (recipe is Float8Recipe.DELAYED) or float8.history < 0:
        what = f"{recipe} scaling of {kind.name} with an amax history of {counted(float8.history, 'step')}"
        yield PlanError(
            what, "delayed scaling looks back on at least one step, other scaling on none", f"{field}.history"
        )
    if recipe is Float8Recipe.TORCHAO and (float8.cached or not kind.compiled):
        what = f"{'cached weights of' if float8.cached else 'eager'} layers of torchao's in {kind.name}"
        rule = "torchao's layers are for compiled blocks, and cast their weights in every forward and backward"
        yield PlanError(what, rule, f"{field}.recipe")
    if plan.edge.dtype == "float64":
        yield PlanError(
            f"float8 layers in {kind.name}, which runs in float64", "float8 is for float32 and bfloat16", field
        )


def _shards(plan: RunPlan, kind: LayerSpec, float8: Float8Layers) -> Iterator[PlanError]:
    """Check what layers with tensor-parallel shards can't do."""
    field, biases = f"kinds[{kind.name}].float8", [f"{path}.bias" for path in float8.layers]
    found = [f"the bias {p.name}" for p in kind.parameters if p.name in biases]
    found += ["torchao's layers"] if float8.recipe is Float8Recipe.TORCHAO else []
    for what in found if plan.mesh.view("tp") else ():
        rule = "float8 layers with tensor-parallel shards are not torchao's, and have no bias"
        yield PlanError(f"{what} in {kind.name}, in float8 with tp", rule, field, axis="tp")


def _weights(plan: RunPlan, kind: LayerSpec, float8: Float8Layers) -> Iterator[PlanError]:
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
            yield PlanError(what, rule, f"{field}.layers", parameter=name)
        for shard in parameter.used:
            if shard.axes != plan.mesh.view("tp"):
                what = f"{name} is sharded along dim {shard.dim} over {join_names(shard.axes)} in use"
                rule = "float8 layers multiply whole matrices, or shards over tp"
                yield PlanError(what, rule, f"{field}.layers", parameter=name, axis=shard.axes[0])
        sharded = tuple(axis for axis in plan.mesh.view("fsdp") if plan.mesh.size(axis) > 1)
        if float8.cached and sharded:
            what = f"the float8 copy of {name}, which {', '.join(sharded)} shard"
            rule = "a cached weight is whole on every rank"
            yield PlanError(what, rule, f"{field}.cached", parameter=name, axis=sharded[0])


NUM_SCALE, NUM_CHOICE = 5, 8
"""Kernels on scalars for a scale, and for choosing it from a history."""


def _casts(product: PlannedOperator, part: Float8Layers, *, shares_input: bool) -> PlannedOperator:
    """Return the casts of a product's operands and of its result's gradient: of the rows of each sample, and of the
    weight once per micro-batch. In a compiled block, casts that share an input are one."""
    size, weight = BYTES[product.rate], product.inner * product.columns
    is_narrow = size < WIDE
    # In float32: the product with the scale, the clamped one and the result; of a scaled cast also the magnitudes.
    once = 4 * WIDE + 5 + (size + WIDE) * is_narrow
    scaled = once + 3 * size
    each, again = 4 + is_narrow, 2 + NUM_SCALE + is_narrow + NUM_CHOICE * (part.history > 0)
    num_weights = 0 if part.cached else 1
    forward = PlannedKernels(
        (each + again) * (1 + num_weights), scaled * product.rows * product.inner, scaled * weight * num_weights
    )
    # The gradient's cast, that of the weight with the same scale, and copies of all three by columns.
    of_weight = product.weights
    backward = PlannedKernels(
        each + again + num_weights * each + product.inputs + 2 * of_weight,
        product.rows * ((scaled + 2 * of_weight) * product.columns + 2 * of_weight * product.inner),
        (once * num_weights + 2 * product.inputs) * weight,
    )
    # Fused: a cast reads its tensor for the scale, unless a history has it, and once more.
    reads = 1 if part.history else 2
    compiled = (reads * size + 1) * product.rows
    fused_forward = PlannedKernels(
        reads * (num_weights + (not shares_input)),
        0 if shares_input else compiled * product.inner,
        (reads * size + 1) * weight * num_weights,
    )
    fused_backward = PlannedKernels(
        reads + num_weights, (compiled + product.rows * of_weight) * product.columns, (size + 1) * weight * num_weights
    )
    return PlannedOperator(
        product.name, OperatorKind.MEMORY, forward=forward, backward=backward,
        fused_forward=fused_forward, fused_backward=fused_backward,
    )  # fmt: skip


FEATURE = Float8InPlans()
