"""Placement, by a plan, of parameters on stages, stages on pipeline ranks, tokens on context-parallel ranks and experts
on ranks of ep.

Used only after a proof has failed, to say what a fault concerns. A wrong placement can give a fault the wrong name, but
can't make a proof pass: the reference that decides knows no ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshwright.nn.attention.mask_spec import Documents, Shard
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.pipeline.split_layers import SharedParameter
from meshwright.plan.context.layers import batch_shards
from meshwright.plan.run_plan import RunPlan
from meshwright.prove.result import index_words, rank_words
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


@dataclass(frozen=True)
class ContextPlacement:
    """Tokens of each context-parallel rank."""

    plan: RunPlan

    def shards(self, documents: Documents | None) -> tuple[Shard, ...]:
        """Return the tokens of each rank of a micro-batch."""
        return batch_shards(self.plan, documents)


def context_placement_of(plan: RunPlan) -> ContextPlacement | None:
    """Return the placement of tokens, or None without context parallelism."""
    return ContextPlacement(plan) if plan.mesh.view("cp") else None


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

    def held(self, position: int) -> range:
        """Return the experts on the rank at a position of its group."""
        return range(position * self.num_local, (position + 1) * self.num_local)

    def describe(self, experts: Iterable[int]) -> str:
        """Format experts with their ranks: `expert 3 (ep rank 0)`, `experts 4…7 (ep rank 1)`, `all experts`."""
        found = sorted(set(experts))
        if len(found) == self.num_experts:
            return "all experts"
        owners = f" (ep {rank_words(expert // self.num_local for expert in found)})" if self.size > 1 else ""
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
