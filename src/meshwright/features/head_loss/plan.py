"""Head and loss by chunks in plans: of how many tokens, and what they keep."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from meshwright.config.facts_for_family import model_facts
from meshwright.config.schema import RunConfig
from meshwright.errors import ConfigError
from meshwright.features.contract import KindPart, PlanFeature
from meshwright.models.contract.building_blocks import LOSS
from meshwright.models.contract.model_facts import KindFacts, ModelFacts, Saved
from meshwright.models.contract.operators import OperatorKind
from meshwright.models.contract.tp_styles import LossReductions
from meshwright.plan.run_plan import BYTES, LayerSpec, PlannedKernels, PlannedOperator, RunPlan
from meshwright.plan.verify.names import PlanError
from meshwright.settings.violation import Violation
from meshwright.units import counted

KEY = "train.loss_chunk"
WIDE = 4
"""Bytes of an element of logits, at least: a loss is computed in float32."""
LARGE_BYTES = 1 << 28
"""Bytes of a micro-batch's logits, with their gradient, from which they are computed by chunks if none is asked for."""
SHARE, FEWEST, MOST = 16, 512, 2048
"""Chunks of a micro-batch, and limits of their tokens: the head and its gradient are read for each chunk, so
that small ones take more time than their products."""
IN_PLACE = ("add", "sub", "mul", "div")
"""Elementwise operators whose derivative is a number. Others have a tensor of it."""
Step = tuple[str, tuple[Any, ...]]
"""An elementwise operator's name, and its numbers."""


@dataclass(frozen=True)
class LossChunks(KindPart):
    """Head whose loss is computed by chunks."""

    feature: ClassVar[str] = "head_loss"

    head: str
    """Path of the linear layer in the end."""
    tokens: int
    """Tokens of a chunk."""
    after: tuple[str, ...] = ()
    """Elementwise operators after the layer, such as `mul(30.0)`."""

    def loss_reductions(self) -> LossReductions:
        return LossReductions((1, 2), self.tokens)

    def steps(self) -> tuple[Step, ...]:
        """Return the operators' names and numbers, or raise a ConfigError."""
        return tuple(_step(text) for text in self.after)


def _step(text: str) -> Step:
    name, _, numbers = text.partition("(")
    with suppress(ValueError):
        found = json.loads(f"[{numbers.removesuffix(')')}]")
        if name.isidentifier() and text.endswith(")") and all(isinstance(one, int | float | None) for one in found):
            return name, tuple(found)
    rule = "an operator after the head is a name with numbers"
    raise ConfigError(f"{text!r} after the head", where="HeadFacts.after", rule=rule, fix="such as mul(30.0)")


class HeadLossInPlans(PlanFeature[LossChunks]):
    """Head and loss by chunks."""

    part = LossChunks

    def rules(self, config: RunConfig) -> Iterator[Violation]:
        facts = model_facts(config)
        if config.train.loss_chunk and not any(kind.head.path for kind in facts.last):
            reason = next((f": {kind.head.reason}" for kind in facts.last if kind.head.reason), "")
            what = f"{KEY} = {config.train.loss_chunk} has no effect{reason}"
            rule = "a loss is computed by chunks where the model's output is that of a linear layer and the loss is "
            yield Violation(ConfigError, what, KEY, f"{rule}cross-entropy", [{KEY: None}])

    def make(self, config: RunConfig, model: ModelFacts, kind: KindFacts, layer: int | None) -> LossChunks | None:
        if layer is not None or not kind.head.path:
            return None
        axes, train = config.mesh.axes(), config.train
        samples = train.global_batch // (axes.data_parallel() * train.num_microbatches)
        tokens = config.train.loss_chunk
        if tokens is None:
            tokens = _worthwhile(kind, samples * model.tokens // axes.cp, axes.tp, model.edge.shape[-1])
        return LossChunks(kind.head.path, tokens, kind.head.after) if tokens else None

    def saved(self, facts: KindFacts, part: LossChunks, *, tp: int, compiled: bool) -> Iterator[Saved]:
        yield Saved(*(-value for value in vars(facts.head.saved).values()))

    def operators(
        self, facts: KindFacts, part: LossChunks, operators: tuple[PlannedOperator, ...], *, samples: int
    ) -> tuple[PlannedOperator, ...]:
        """Return the end's operators if the forward computes the gradients of head and loss, too, chunk by chunk."""
        found: list[PlannedOperator] = []
        for one in operators:
            if one.kind is OperatorKind.PRODUCT and one.name == part.head:
                chunks = -(-samples * one.rows // part.tokens)
                product = replace(one, groups=chunks, inputs=0, weights=0, backward=PlannedKernels())
                found += [*[product] * (1 + one.inputs + one.weights), _loss(one, chunks)]
            elif one.name != LOSS:
                found.append(one)
        return tuple(found)

    def faults(self, plan: RunPlan) -> Iterator[PlanError]:
        for kind in plan.kinds:
            if (part := kind.part(LossChunks)) is None:
                continue
            field = f"kinds[{kind.name}].{part.feature}"
            if kind.is_block or not kind.output_elements:
                yield PlanError(f"{kind.name} has a loss by chunks", "only an end with an output has a loss", field)
            if part.tokens < 1:
                yield PlanError(f"a chunk of {part.tokens} tokens", "a chunk has tokens", f"{field}.tokens")
            if inside := [one for unit in kind.units for one in unit.modules if part.head.startswith(f"{one}.")]:
                rule = "a forward ends with the head, so that modules around it don't return"
                yield PlanError(f"{part.head} is a part of {inside[0]}, an FSDP unit", rule, f"{field}.head")
            try:
                part.steps()
            except ConfigError as error:
                yield PlanError(error.what, error.rule, f"{field}.after")

    def output_bytes(self, plan: RunPlan, kind: LayerSpec, part: LossChunks, whole: int) -> int:
        """Return the bytes of a chunk's logits, once more in the dtype of the computation, of what it adds to the
        head's gradient, if that isn't added in place, and of what a micro-batch keeps: the gradients of the hidden
        states and of the head. Where an operator after the head has a derivative, its argument, its result and the
        derivative live at once."""
        weight = next((p for p in kind.parameters if p.name == f"{part.head}.weight"), None)
        width, is_trained = (plan.edge.shape[-1], True) if weight is None else (weight.shape[1], weight.trained)
        tokens, compute = plan.batch.samples * plan.rank_tokens, BYTES[plan.edge.dtype]
        columns = kind.output_elements // plan.rank_tokens
        each = max(WIDE, compute) + (compute if compute < WIDE else 0)
        has_slopes = any(name not in IN_PLACE for name, _ in part.steps())
        rows = min(part.tokens, tokens) * (3 * max(WIDE, compute) if has_slopes else each)
        return (rows + width * is_trained * each) * columns + tokens * width * compute

    def plan_in_trace(self, plan: RunPlan) -> RunPlan:
        return replace(plan, kinds=tuple(kind.without(LossChunks) for kind in plan.kinds))

    def page(self, plan: RunPlan) -> Iterator[tuple[str, ...]]:
        yield ("head and loss by chunks",)
        for kind in plan.kinds:
            if (part := kind.part(LossChunks)) is not None:
                yield " · ".join((part.head, *part.after)), f"{counted(part.tokens, 'token')} at once"


def _worthwhile(kind: KindFacts, tokens: int, tp: int, width: int) -> int:
    """Return the tokens of a chunk, 0 if all logits at once are small, or smaller than the gradient of the head."""
    columns = int(kind.output) // (tp if kind.output_divided else 1)
    logits = 2 * WIDE * tokens * columns
    chunk = min(MOST, max(FEWEST, tokens // SHARE))
    return 0 if logits < LARGE_BYTES or logits < 2 * WIDE * columns * width or chunk >= tokens else chunk


KERNELS = 24
"""Kernels of a chunk's loss and its gradient, besides the products."""


def _loss(head: PlannedOperator, chunks: int) -> PlannedOperator:
    """Return the kernels of a loss by chunks: those on a chunk's logits, in float32 at least, and those that add up the
    head's gradient; the backward multiplies gradients by the loss's own."""
    size, weight = BYTES[head.rate], head.inner * head.columns
    wide, is_narrow = max(WIDE, size), size < WIDE
    logits = 10 * wide + 2 * (size + wide) * is_narrow
    added = 2 * wide + size if is_narrow else wide
    forward = PlannedKernels(
        1 + head.weights + chunks * (KERNELS + (2 + head.weights) * is_narrow),
        head.rows * head.columns * logits,
        head.weights * weight * (wide + chunks * added),
    )
    backward = PlannedKernels(
        head.inputs + head.weights * (1 + is_narrow),
        head.inputs * 2 * size * head.rows * head.inner,
        head.weights * weight * (2 * wide + (wide + size) * is_narrow),
    )
    fused = replace(forward, num_bytes=head.rows * head.columns * 4 * wide, launches=5 * chunks)
    return PlannedOperator(
        LOSS, OperatorKind.MEMORY, forward=forward, backward=backward, fused_forward=fused, fused_backward=backward
    )


FEATURE = HeadLossInPlans()
