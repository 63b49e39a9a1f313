"""Memory of error feedback on a rank: LoCo keeps the error of all gradients that the rank sends, twice, so that a step
can be skipped."""

from __future__ import annotations

from meshwright.comm.compression.catalogue import ERROR_CODEC, find_method
from meshwright.plan.collective_bytes import two_stage_peers
from meshwright.plan.fsdp_unit_sizes import UnitSizes, unit_sizes
from meshwright.plan.run_plan import RunPlan

NUM_ERROR_BUFFERS = 2
"""Number of error buffers: that of the accepted steps, and that of the current step."""


def feedback_bytes(plan: RunPlan, rank: int) -> int:
    """Return the bytes of error feedback on a rank: for full gradients, or in a two-stage reduction for the shards of
    its local index."""
    return NUM_ERROR_BUFFERS * sum(
        _unit_bytes(plan, rank, sizes)
        for stage in plan.stages_of(rank)
        for sizes in unit_sizes(plan, plan.stages[stage])
        if sizes.num_trained and find_method(sizes.unit.gradients).feedback
    )


def _unit_bytes(plan: RunPlan, rank: int, sizes: UnitSizes) -> int:
    line, num_replicas = plan.mesh.line(rank, sizes.unit.sharded), plan.mesh.size(*sizes.unit.replicas)
    far, total = two_stage_peers(plan.mesh, rank, line)[1], 0
    if len(line) > 1:
        total += (len(far) + 1 if far else len(line)) * _error_bytes(sizes.num_trained)
    if num_replicas > 1:  # for each shard, and for the sum of the local one
        total += (num_replicas + 1) * _error_bytes(-(-sizes.num_trained // num_replicas))
    return total


def _error_bytes(num_elements: int) -> int:
    return ERROR_CODEC.encoded_bytes(num_elements)
