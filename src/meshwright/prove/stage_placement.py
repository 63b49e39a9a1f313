"""Placement of parameters on pipeline stages, and of stages on pipeline ranks.

Derived from the plan alone; used to name the faulty stage in findings about parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshwright.pipeline.split_layers import SharedParameter
from meshwright.plan.run_plan import RunPlan
from meshwright.units import join_words


@dataclass(frozen=True)
class StagePlacement:
    """Stages of a pipeline, in model order."""

    ranks: tuple[int, ...]
    """Pipeline rank of each stage."""
    layers: tuple[range, ...]
    """Layers of each stage."""
    holders: Mapping[str, tuple[int, ...]]
    """Stages that hold each parameter, by name."""
    shared: tuple[SharedParameter, ...] = ()
    """Parameters shared between stages."""
    splits_backward: bool = False
    """Whether the backward pass B is split into I (input gradients) and W (deferred weight gradients)."""

    @property
    def last(self) -> int:
        """Index of the last stage."""
        return len(self.ranks) - 1

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return max(self.ranks) + 1

    def stages_with(self, name: str) -> tuple[int, ...]:
        """Return the stages that hold the parameter."""
        return self.sharing_stages(name) or self.holders.get(name, (self.last,))

    def sharing_stages(self, name: str) -> tuple[int, ...]:
        """Return the stages that share the parameter, or an empty tuple if it is not shared."""
        return next((parameter.stages() for parameter in self.shared if parameter.key == name), ())

    def stages_with_any(self, names: Iterable[str]) -> tuple[int, ...]:
        """Return the stages that hold at least one of the parameters."""
        return tuple(sorted({stage for name in names for stage in self.stages_with(name)}))

    def describe(self, stages: Iterable[int]) -> str:
        """Format stages with their pipeline ranks: `stage 1 (pp rank 1)`, `stages 0 and 3 (pp rank 0)`."""
        unique = sorted(set(stages))
        ranks = sorted({self.ranks[stage] for stage in unique})
        return f"{_numbered('stage', unique)} ({_numbered('pp rank', ranks)})"


def stage_placement_of(plan: RunPlan) -> StagePlacement | None:
    """Return the stage placement of a plan, or None without a pipeline."""
    if len(plan.stages) == 1:
        return None
    holders: dict[str, list[int]] = defaultdict(list)
    for number, stage in enumerate(plan.stages):
        for kind, layer, parameter in plan.parameters(stage):
            holders[kind.key(parameter, layer)].append(number)
    return StagePlacement(
        plan.schedule.stage_ranks,
        tuple(range(*stage.layers) for stage in plan.stages),
        {name: tuple(stages) for name, stages in holders.items()},
        shared=plan.shared_parameters(),
        splits_backward=plan.schedule.splits_backward,
    )


def _numbered(word: str, numbers: list[int]) -> str:
    plural = "s" if len(numbers) > 1 else ""
    return f"{word}{plural} {join_words([str(number) for number in numbers])}"
