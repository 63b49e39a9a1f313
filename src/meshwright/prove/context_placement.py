"""Placement of tokens on context-parallel ranks, derived from the plan alone.

Used only after a proof has failed, to say which rank's tokens a fault concerns. A wrong placement can give a fault the
wrong name, but can't make a proof pass: the reference that decides knows no ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.mesh.axes import Axes
from meshwright.nn.attention.mask_spec import Documents, Shard
from meshwright.plan.context.layers import batch_shards
from meshwright.plan.run_plan import RunPlan
from meshwright.prove.diagnose.phrases import rank_words


@dataclass(frozen=True)
class ContextPlacement:
    """Tokens of each context-parallel rank."""

    plan: RunPlan
    axes: Axes

    def shards(self, documents: Documents | None) -> tuple[Shard, ...]:
        """Return the tokens of each rank of a micro-batch."""
        return batch_shards(self.plan, documents)

    def describe(self, position: int) -> str:
        """Format a position on the axis with its ranks: `cp rank 1 (ranks 1 and 3)`."""
        ranks = [rank for rank in range(self.axes.num_ranks()) if self.axes.coordinate(rank)["cp"] == position]
        return f"cp rank {position} ({rank_words(ranks)})"


def context_placement_of(plan: RunPlan, axes: Axes) -> ContextPlacement | None:
    """Return the placement of tokens, or None without context parallelism."""
    return ContextPlacement(plan, axes) if plan.mesh.view("cp") else None
