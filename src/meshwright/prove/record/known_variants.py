"""What a failed proof of a plan is compared with: references with known faults, and contributions of token shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from meshwright.config.schema import RunConfig
from meshwright.models.contract.family import TrainingData
from meshwright.plan.run_plan import RunPlan
from meshwright.prove.context_placement import context_placement_of
from meshwright.prove.expert_placement import expert_placement_of
from meshwright.prove.record.context_variants import ContextVariants
from meshwright.prove.record.evidence import ContextEvidence, Variant, Variants
from meshwright.prove.record.expert_variants import ExpertVariants
from meshwright.prove.record.optimizer_variants import OptimizerVariants
from meshwright.prove.record.token_contributions import token_contributions


class KnownVariants:
    """Variants of several parts of a model."""

    def __init__(self, parts: Sequence[Variants]) -> None:
        self._parts = parts

    def of_first_step(self) -> Iterator[Variant]:
        """Yield the variants of all parts that differ in step 1."""
        return (variant for part in self._parts for variant in part.of_first_step())

    def of_later_steps(self) -> Iterator[Variant]:
        """Yield the variants of all parts that differ from step 2 on."""
        return (variant for part in self._parts for variant in part.of_later_steps())


def known_variants(config: RunConfig, data: TrainingData, plan: RunPlan, *, num_steps: int) -> Variants:
    """Return the faulty references for a plan."""
    context, experts = context_placement_of(plan, config.mesh.axes()), expert_placement_of(plan)
    parts: list[Variants] = []
    if context is not None:
        parts.append(ContextVariants(config, data, context))
    # Under cp, ranks of ep share samples, so no fault of theirs is one of whole data-parallel ranks.
    if experts is not None and (context is None or experts.size == 1):
        parts.append(ExpertVariants(config, data, experts, num_steps=num_steps))
    return KnownVariants([*parts, OptimizerVariants(config, data, num_steps=num_steps)])


def context_contributions(config: RunConfig, data: TrainingData, plan: RunPlan) -> Callable[[], ContextEvidence] | None:
    """Return what computes the contributions of context-parallel ranks, or None without any."""
    placement = context_placement_of(plan, config.mesh.axes())
    return None if placement is None else partial(token_contributions, config, data, placement)
