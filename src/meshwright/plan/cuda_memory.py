"""Predict what PyTorch's allocator holds on a GPU at the peak of a step: `torch.cuda.max_memory_allocated`.

A step of one micro-batch on one stage peaks in one of three moments, which hold different types of memory:

1. in the loss, all activations and the logits, but no gradients yet, and no gathered weights but those that are kept;
2. in the backward of the last block, all activations but the logits, and the gradients of the ends after it;
3. in the backward of the first block, its activations, and all gradients.

Between the last two, the gradients of blocks take the place of their activations. Several micro-batches accumulate
gradients, and pipeline stages run them in turns: the sum of all types is at least their peak.

What is saved is counted as CUDA's kernels save it (`KindFacts.fused`, `.compiled`). Tensors count with their own sizes:
the allocator rounds them to 512 bytes, and gives one of over 1 MiB up to 1 MiB more, if a free block is that large.
Reserved memory is more (`reserved_bytes`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.plan.memory import MemoryEstimate, by_pipeline_rank, stage_bytes
from meshwright.plan.run_plan import BYTES, RunPlan, Stage
from meshwright.units import MIB

WORKSPACES = 2 * 32 * MIB
"""cuBLAS's workspaces of a stream, one for the thread of the forward and one for that of the backward: 32 MiB each on
GPUs of compute capability 9.0, and 8.1 MiB on others, unless CUBLAS_WORKSPACE_CONFIG says otherwise (PyTorch's
`CublasHandlePool.cpp`, which allocates them)."""
RESERVED = 1.25
"""What PyTorch's allocator reserves at most over what is allocated: of 454 runs whose estimate was under 80 % of the
device's memory, none ran out of it (Fujii et al. 2024, arXiv:2411.06465)."""


def reserved_bytes(allocated: int) -> tuple[int, int]:
    """Return the least and the most that PyTorch's allocator is expected to reserve for what is allocated."""
    return allocated, int(RESERVED * allocated)


def predict_cuda_memory(plan: RunPlan) -> MemoryEstimate:
    """Predict the memory in bytes, by type, of the rank with the most at its peak."""
    ranks = [replace(one, workspace=WORKSPACES) for one in by_pipeline_rank(plan, on_cuda=True)]
    if len(plan.stages) == 1 and plan.batch.num_microbatches == 1:
        ranks = [moment for rank in ranks for moment in _moments(plan, plan.stages[0], rank)]
    return max(ranks, key=MemoryEstimate.total)


def _moments(plan: RunPlan, stage: Stage, rank: MemoryEstimate) -> Iterator[MemoryEstimate]:
    """Yield what a rank holds in each moment, given what it holds of each type at most."""
    sizes = stage_bytes(plan, stage, on_cuda=True)
    yield replace(rank, gradients=0, gathered=kept_weight_bytes(plan, stage), activations=sizes.saved + sizes.output)
    ends = end_gradient_bytes(plan, stage)
    yield replace(rank, gradients=ends, activations=sizes.saved + sizes.running)
    yield replace(rank, activations=sizes.saved // max(1, len(stage.kinds)) + sizes.running)


def end_gradient_bytes(plan: RunPlan, stage: Stage) -> int:
    """Return the bytes of the gradients of a stage's ends after its blocks."""
    return sum(
        plan.elements(one, sharded=plan.unit_of(stage, kind, one).sharded) * BYTES[plan.masters]
        for kind in map(plan.kind, stage.after)
        for one in kind.parameters
        if one.trained
    )


def kept_weight_bytes(plan: RunPlan, stage: Stage) -> int:
    """Return the bytes of gathered weights, or shards of them, that are kept from the forward to the backward."""
    if not plan.has_units:
        return 0
    units = ((plan.unit_of(stage, kind, one), one) for kind, _, one in plan.parameters(stage))
    return sum(
        plan.elements(one) * BYTES[unit.compute] // max(1, int(unit.freed))
        for unit, one in units
        if unit.freed is not True
    )
