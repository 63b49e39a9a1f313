"""Placement of experts on ranks, derived from the plan alone; used to name experts and ranks in findings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.plan.run_plan import RunPlan
from meshwright.prove.diagnose.phrases import index_words, rank_words


@dataclass(frozen=True)
class ExpertPlacement:
    """Experts of all layers. Consecutive data-parallel ranks form groups, and each rank of a group holds as many
    consecutive experts."""

    parameters: frozenset[str]
    """Names of the parameters that are stacked by expert."""
    num_experts: int
    size: int
    """Number of ranks in a group (ep), at least 1."""
    num_groups: int
    """Number of groups in a stage; ranks at the same position of all groups hold the same experts."""
    recomputes: bool = False
    """Whether layers with experts are recomputed."""

    @property
    def num_local(self) -> int:
        """Number of experts on a rank."""
        return self.num_experts // self.size

    def position(self, dp_rank: int) -> int:
        """Return the position of a data-parallel rank in its group."""
        return dp_rank % self.size

    def group(self, dp_rank: int) -> int:
        """Return the group of a data-parallel rank."""
        return dp_rank // self.size

    def owners(self, experts: Iterable[int]) -> list[int]:
        """Return the positions in a group of the ranks that hold the experts."""
        return sorted({expert // self.num_local for expert in experts})

    def describe(self, experts: Iterable[int]) -> str:
        """Format experts with their ranks: `expert 3 (ep rank 0)`, `experts 4…7 (ep rank 1)`, `all experts`."""
        found = sorted(set(experts))
        if len(found) == self.num_experts:
            return "all experts"
        owners = f" (ep {rank_words(self.owners(found))})" if self.size > 1 else ""
        return f"expert{'s' if len(found) > 1 else ''} {index_words(found)}{owners}"


def expert_placement_of(plan: RunPlan) -> ExpertPlacement | None:
    """Return the placement of experts, or None for a model without any."""
    names, layers, recomputes = set(), [], False
    for stage in plan.stages:
        for kind, layer, parameter in plan.parameters(stage):
            if kind.experts is not None and parameter.name.startswith(f"{kind.experts.experts}."):
                names.add(kind.key(parameter, layer))
                layers.append(kind.experts)
                recomputes |= kind.recompute != RecomputePolicy.NONE
    if not layers:
        return None
    size, mesh = plan.mesh.size(*layers[0].axes), plan.mesh
    num_data = mesh.size(*mesh.view("batch"))
    return ExpertPlacement(frozenset(names), layers[0].num_experts, size, num_data // size, recomputes)
