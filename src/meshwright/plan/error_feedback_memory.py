"""Memory of error feedback on a rank: LoCo keeps the error of all gradients that the rank sends, twice, so that a step
can be skipped."""

from __future__ import annotations

from meshwright.comm.compression.catalogue import ERROR_CODEC, find_method
from meshwright.plan.collective_bytes import two_stages
from meshwright.plan.fsdp_unit_sizes import UnitSizes, unit_sizes
from meshwright.plan.run_plan import RunPlan

COPIES = 2
"""Number of error buffers: that of the accepted steps, and that of the current step."""


def feedback_bytes(plan: RunPlan, rank: int) -> int:
    """Return the bytes of error feedback on a rank: for full gradients, or in a two-stage reduction for the shards of
    its local index."""
    return COPIES * sum(
        _of_unit(plan, rank, one)
        for stage in plan.stages_of(rank)
        for one in unit_sizes(plan, plan.stages[stage])
        if one.num_trained and find_method(one.unit.gradients).feedback
    )


def _of_unit(plan: RunPlan, rank: int, one: UnitSizes) -> int:
    line, num_replicas = plan.mesh.line(rank, one.unit.sharded), plan.mesh.size(*one.unit.replicas)
    far, total = two_stages(plan.mesh, rank, line)[1], 0
    if len(line) > 1:
        total += (len(far) + 1 if far else len(line)) * _kept(one.num_trained)
    if num_replicas > 1:  # for each shard, and for the sum of the local one
        total += (num_replicas + 1) * _kept(-(-one.num_trained // num_replicas))
    return total


def _kept(num_elements: int) -> int:
    return ERROR_CODEC.encoded_bytes(num_elements)
