"""Where a pipeline has its parameters: which stages hold one, and on which rank of the pipeline a stage is.

Names from the plan, nothing else, so that a finding about some parameters can be one about a stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshwright.pipeline.shared_parameters import SharedParameter
from meshwright.plan.run_plan import RunPlan
from meshwright.prove.diagnose.phrases import join_words


@dataclass(frozen=True)
class Stages:
    """The stages of a pipeline, in the model's order."""

    ranks: tuple[int, ...]
    """Of each stage, its rank of the pipeline."""
    layers: tuple[range, ...]
    """Of each stage, its blocks."""
    holders: Mapping[str, tuple[int, ...]]
    """The stages that hold a parameter, by its name."""
    shared: tuple[SharedParameter, ...] = ()
    """Parameters with copies on several stages."""
    splits_backward: bool = False
    """Gradients of weights are deferred: B is I and W."""

    @property
    def last(self) -> int:
        """The last stage."""
        return len(self.ranks) - 1

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return max(self.ranks) + 1

    def of(self, name: str) -> tuple[int, ...]:
        """The stages that hold a parameter."""
        return self.sharing(name) or self.holders.get(name, (self.last,))

    def sharing(self, name: str) -> tuple[int, ...]:
        """The stages that have copies of a shared parameter; none if it isn't shared."""
        return next((parameter.stages() for parameter in self.shared if parameter.key == name), ())

    def holding(self, names: Iterable[str]) -> tuple[int, ...]:
        """The stages that hold any of some parameters."""
        return tuple(sorted({stage for name in names for stage in self.of(name)}))

    def words(self, stages: Iterable[int]) -> str:
        """`stage 1 (pp rank 1)`, `stages 0 and 3 (pp rank 0)`."""
        found = sorted(set(stages))
        ranks = sorted({self.ranks[stage] for stage in found})
        return f"{_numbered('stage', found)} ({_numbered('pp rank', ranks)})"


def stages_of(plan: RunPlan) -> Stages | None:
    """A plan's stages; None without a pipeline."""
    if len(plan.stages) == 1:
        return None
    holders: dict[str, list[int]] = defaultdict(list)
    for number, stage in enumerate(plan.stages):
        for kind, layer, parameter in plan.parameters(stage):
            holders[kind.key(parameter, layer)].append(number)
    return Stages(
        plan.schedule.stage_ranks,
        tuple(range(*stage.layers) for stage in plan.stages),
        {name: tuple(found) for name, found in holders.items()},
        shared=plan.shared_parameters(),
        splits_backward=plan.schedule.splits_backward,
    )


def _numbered(word: str, numbers: list[int]) -> str:
    plural = "s" if len(numbers) > 1 else ""
    return f"{word}{plural} {join_words([str(number) for number in numbers])}"
