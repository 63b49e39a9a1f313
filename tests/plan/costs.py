"""Costs of a plan's kinds: operations, bytes read and written, and kernels launched, by part of a micro-batch.

A fold over the kinds' operators. Under recomputation, a block's forward runs again but for what the policy keeps and
what nothing in the backward needs. Sums of gradients over micro-batches, the optimizer and collectives aren't counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from meshwright.models.contract.operators import OperatorKind
from meshwright.plan.run_plan import BYTES, LayerSpec, PlannedKernels, PlannedOperator, RunPlan, Stage
from meshwright.plan.time.kernel_times import ATTENTION_BACKWARD, OPERAND_BYTES, runs_again


@dataclass(frozen=True)
class Costs:
    """Costs of a part."""

    flops: int = 0
    num_bytes: int = 0
    launches: int = 0

    def __add__(self, other: Costs) -> Costs:
        return Costs(self.flops + other.flops, self.num_bytes + other.num_bytes, self.launches + other.launches)


@dataclass(frozen=True)
class PartCosts:
    """Costs per micro-batch by part."""

    forward: Costs = Costs()
    input_gradient: Costs = Costs()
    """The backward without the products that are gradients of weights, which a schedule may defer."""
    weight_gradient: Costs = Costs()
    recomputation: Costs = Costs()

    def __add__(self, other: PartCosts) -> PartCosts:
        return PartCosts(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def backward(self) -> Costs:
        """Return the costs of the whole backward."""
        return self.input_gradient + self.weight_gradient + self.recomputation


@dataclass(frozen=True)
class CostModel:
    """How kinds run on a rank."""

    samples: int
    """Samples of a micro-batch."""
    dtype: str
    """Dtype of what products return."""
    on_cuda: bool = False

    @classmethod
    def of(cls, plan: RunPlan, *, on_cuda: bool = False) -> CostModel:
        """Return how a plan's kinds run."""
        return cls(plan.batch.samples, plan.edge.dtype, on_cuda)

    def of_kind(self, kind: LayerSpec) -> PartCosts:
        """Return the costs of a kind, as it is recomputed and compiled."""
        return reduce(PartCosts.__add__, (self.of_operator(one, kind) for one in kind.operators), PartCosts())

    def of_operator(self, one: PlannedOperator, kind: LayerSpec) -> PartCosts:
        """Return the costs of an operator of a kind."""
        fuses = kind.compiled or (self.on_cuda and one.fused_on_cuda)
        forward = self._kernels(one.forward, one.fused_forward, fuses)
        backward = self._kernels(one.backward, one.fused_backward, fuses)
        weight = Costs()
        if one.kind is OperatorKind.ATTENTION:
            flops = self.samples * one.attention_flops
            forward += Costs(flops, launches=1)
            backward += Costs(int(ATTENTION_BACKWARD * flops), launches=1)
        elif one.kind is not OperatorKind.MEMORY:
            product = self.product(one)
            forward += product
            backward += product if one.inputs else Costs()
            weight = product if one.weights else Costs()
        return PartCosts(forward, backward, weight, forward if runs_again(one, kind.recompute) else Costs())

    def product(self, one: PlannedOperator) -> Costs:
        """Return the costs of one of a product's three passes: all have the same operands."""
        rows = self.samples * one.rows
        operand = OPERAND_BYTES[one.rate]
        result = max(operand, BYTES[self.dtype])
        weights = one.groups * one.inner * one.columns
        num_bytes = operand * (rows * one.inner + weights) + result * rows * one.columns
        return Costs(self.samples * one.flops, num_bytes, 1 if one.kind is OperatorKind.GROUPED else one.groups)

    def _kernels(self, eager: PlannedKernels, fused: PlannedKernels | None, fuses: bool) -> Costs:
        found = (fused or PlannedKernels()) if fuses else eager
        return Costs(0, self.samples * found.num_bytes + found.bytes_once, found.launches)


def costs_of_stage(plan: RunPlan, stage: Stage, *, on_cuda: bool = False) -> PartCosts:
    """Return the costs of a micro-batch on a rank of a stage."""
    model = CostModel.of(plan, on_cuda=on_cuda)
    return reduce(PartCosts.__add__, (model.of_kind(kind) for kind, _ in plan.held(stage)), PartCosts())


def costs_of_step(plan: RunPlan, *, on_cuda: bool = False) -> PartCosts:
    """Return the costs of a step, on one rank of each stage together."""
    found = reduce(PartCosts.__add__, (costs_of_stage(plan, one, on_cuda=on_cuda) for one in plan.stages))
    return reduce(PartCosts.__add__, [found] * plan.batch.num_microbatches)
