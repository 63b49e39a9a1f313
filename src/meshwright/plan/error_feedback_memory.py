"""Memory for error feedback on a rank: LoCo keeps two copies of the compression error of all gradients sent, so that a
step can be skipped."""

from __future__ import annotations

from meshwright.comm.compression.catalogue import ERROR_CODEC, find_method
from meshwright.plan.collective_bytes import two_stage_peers
from meshwright.plan.fsdp_unit_sizes import UnitSizes, unit_sizes
from meshwright.plan.run_plan import RunPlan

NUM_ERROR_BUFFERS = 2
"""Number of error buffers: one as of the last accepted step, one for the current step."""


def feedback_bytes(plan: RunPlan, rank: int) -> int:
    """Return the size in bytes of a rank's error feedback. It covers full gradients or, in a two-stage reduction, the
    shards with the rank's local index."""
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
    if num_replicas > 1:  # one per shard sent, and one for the sum of the local shard
        total += (num_replicas + 1) * _error_bytes(-(-sizes.num_trained // num_replicas))
    return total


def _error_bytes(num_elements: int) -> int:
    return ERROR_CODEC.encoded_bytes(num_elements)
