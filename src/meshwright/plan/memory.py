"""Predict a rank's memory by category from the plan.

Exact for state kept between steps. Activations are counted per operation, of compiled blocks as PyTorch's partitioner
saves them, and two blocks are assumed to be unsharded at a time, since FSDP2 prefetches one.

Context-parallel attention keeps bytes besides what attention on one rank keeps.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING

from meshwright.comm.compression.catalogue import ERROR_CODEC, find_method
from meshwright.features.registry import plan_features
from meshwright.models.contract.tp_styles import StyleKind
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.pipeline.simulate import Costs, PeakBytes, StageCosts, peak_bytes
from meshwright.plan.run_plan import BYTES, ContextMethod, LayerSpec, RunPlan, SavedBytes, Stage
from meshwright.plan.stage_sizes import UnitSizes, counted_parameters, unit_sizes
from meshwright.plan.traffic import two_stage_peers
from meshwright.units import MIB

if TYPE_CHECKING:
    from meshwright.nn.attention.mask_spec import MaskSpec, Shard
    from meshwright.plan.context.exchange import Exchange
    from meshwright.plan.context.method import AttentionDims

LIBRARIES, TRACER, COMPILER = 280 * MIB, 115 * MIB, 60 * MIB
"""Memory of a rank on the CPU without its tensors: Python and PyTorch 2.13 (CPU build); `torch._dynamo`, which FSDP2,
DTensor's operators, checkpoints of recomputation and experts import, though they compile nothing; and, of compiled
blocks, the compiler; measured."""
SHARED = 200 * MIB
"""Pages of libraries that all ranks of a machine share."""
HOLES = 0.15
"""Free memory between tensors that glibc's allocator holds, relative to gradients and activations; measured."""
NUM_ERROR_BUFFERS = 2
"""Number of error buffers: one as of the last accepted step, one for the current step."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory in bytes by category, on the rank with the highest total."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    """Unsharded parameters and gradients of blocks that are gathered at the same time; with several micro-batches, the
    gradients of all blocks."""
    activations: int
    """Activations of all micro-batches in flight."""
    buffers: int
    """Receive buffers for tensors from other stages."""
    errors: int
    """Error feedback for compression."""
    workspace: int = 0
    """What cuBLAS keeps for its products on a GPU."""

    def total(self) -> int:
        """Return the total, excluding the Python process and its libraries."""
        return sum(getattr(self, field.name) for field in fields(self))


def predict_memory(plan: RunPlan) -> MemoryEstimate:
    """Predict the peak memory of the rank with the highest total, excluding the Python process and its libraries."""
    return max(by_pipeline_rank(plan), key=MemoryEstimate.total)


def by_pipeline_rank(plan: RunPlan, *, on_cuda: bool = False) -> list[MemoryEstimate]:
    """Return what a rank in each place of the pipeline holds of each type at most, though not all at one time."""
    size = plan.mesh.num_ranks() // plan.mesh.size("pp")
    costs = Costs([stage_costs(plan, stage, on_cuda=on_cuda) for stage in plan.stages])
    return [rank_bytes(plan, place * size, peak) for place, peak in enumerate(peak_bytes(plan.schedule, costs))]


def predict_process_memory(plan: RunPlan) -> int:
    """Predict the peak resident memory in bytes of the rank with the most on CPUs: libraries, tensors and holes."""
    libraries = library_bytes(plan)
    return process_memory(predict_memory(plan), num_ranks=plan.mesh.num_ranks(), libraries=libraries)


def process_memory(memory: MemoryEstimate, *, num_ranks: int, libraries: int = LIBRARIES + TRACER) -> int:
    """Return the peak resident memory of a rank on a CPU, given that of its tensors and of libraries."""
    # One rank frees tensors in reverse order, which leaves no holes; buffers of collectives are freed in between.
    # FSDP2 copies gathered blocks out of, and gradients into, flat buffers of the same size.
    holes = memory.gathered + HOLES * (memory.gradients + memory.activations) if num_ranks > 1 else 0
    return libraries + memory.total() + int(holes)


def library_bytes(plan: RunPlan) -> int:
    """Return the memory of a rank on the CPU without its tensors."""
    compiles = any(kind.compiled for kind in plan.kinds)
    special = any(kind.recompute is not RecomputePolicy.NONE or kind.experts is not None for kind in plan.kinds)
    traces = compiles or special or plan.mesh.num_ranks() > plan.mesh.size("pp")
    return LIBRARIES + max(traces * TRACER, plan.libraries) + compiles * COMPILER


def rank_bytes(plan: RunPlan, rank: int, peak: PeakBytes) -> MemoryEstimate:
    """Return what a rank holds of each type at most, given the peak of its activations."""
    stages = [plan.stages[stage] for stage in plan.stages_of(rank)]
    master, stored, trained, state = BYTES[plan.masters], 0, 0, 0
    for stage in stages:
        for kind, parameter, number in counted_parameters(plan, stage):
            local = plan.local_shape(parameter, sharded=plan.unit_of(stage, kind, parameter).sharded)
            stored += number * math.prod(local)
            if parameter.trained:
                trained += number * math.prod(local)
                states = (one for one in plan.optimizer.update_of(parameter.role).states if one.dims != ())
                state += number * sum(math.prod(one.local_shape(local)) * BYTES[one.dtype] for one in states)
    saved = sum(math.prod(b.shape) * BYTES[b.dtype] for s in stages for kind, _ in plan.held(s) for b in kind.buffers)
    kept = sum(feature.weight_bytes(plan, stage) for feature in plan_features(plan=plan) for stage in stages)
    return MemoryEstimate(
        parameters=stored * master + saved + kept,
        gradients=trained * master,
        optimizer=state,
        gathered=gathered_bytes(plan, stages),
        activations=peak.activations + peak.retained + peak.recompute,
        buffers=peak.buffers,
        errors=feedback_bytes(plan, rank),
    )


def gathered_bytes(plan: RunPlan, stages: list[Stage]) -> int:
    """Return the size in bytes of two blocks and the largest ends, gathered at the same time, with their gradients."""
    if not plan.has_units:
        return 0
    blocks = [plan.kind(name) for stage in stages for name in stage.kinds]
    compute = BYTES[stages[0].root.compute]
    block = max((_gathered_elements(plan, kind) for kind in plan.kinds if kind.is_block), default=0)
    gathered = 2 * (min(2, len(blocks)) * block + _ends(plan)) * compute
    accumulates = plan.batch.num_microbatches > 1 or plan.schedule.splits_backward
    if accumulates and plan.mesh.size(*plan.mesh.view("fsdp")) > 1:
        # Gradients are reduced after the last micro-batch's; those of all blocks are unsharded until then.
        # A unit that isn't sharded, as that of experts over all ranks, reduces none: its gradients are the rank's own.
        alone = {name for kind in blocks for unit in kind.units if not unit.sharded for name in unit.parameters}
        reduced = max((_gathered_elements(plan, kind, but=alone) for kind in plan.kinds if kind.is_block), default=0)
        gathered += max(0, len(blocks) - 2) * reduced * BYTES[plan.masters]
    freed = [unit.freed for kind in blocks for unit in kind.units]
    if freed and freed[0] is not True:
        # Other blocks are kept, unsharded or as secondary shards, from forward to backward.
        gathered += max(0, len(blocks) - 2) * block * compute // max(1, int(freed[0]))
    return gathered


def _gathered_elements(plan: RunPlan, kind: LayerSpec, *, but: Collection[str] = ()) -> int:
    """Return the elements of a gathered block. Assumes that tp shards all its parameters, and ep those of experts."""
    tp, layer = plan.mesh.size(*plan.mesh.view("tp")), kind.experts
    ep, experts = (1, "") if layer is None else (plan.mesh.size(*layer.axes), f"{layer.experts}.")
    parameters = [p for p in kind.parameters if p.name not in but]
    return sum(math.prod(p.shape) // (ep if experts and p.name.startswith(experts) else 1) for p in parameters) // tp


def _ends(plan: RunPlan) -> int:
    """Return the number of elements of the ends on all stages or, if there are none, of the largest end's matrices."""
    ends = [kind for kind in plan.kinds if not kind.is_block]
    if any(kind.everywhere and kind.parameters for kind in ends):
        return sum(plan.elements(p) for kind in ends if kind.everywhere for p in kind.parameters)
    matrices = ([p for p in kind.parameters if len(p.shape) > 1] for kind in ends)
    return max((sum(plan.elements(p) for p in found) for found in matrices), default=0)


@dataclass(frozen=True)
class StageBytes:
    """Sizes in bytes per micro-batch on a stage."""

    saved: int
    """Activations saved for the backward."""
    running: int
    """What the backward of a block holds besides: what a recomputed one saves again and, on CUDA, gradients in it."""
    output: int
    """The output with its gradient."""
    stream: int
    """What goes from block to block."""


def stage_costs(plan: RunPlan, stage: Stage, *, on_cuda: bool = False) -> StageCosts:
    """Return the sizes in bytes per micro-batch on a stage: activations saved for the backward, and the output with its
    gradient."""
    sizes = stage_bytes(plan, stage, on_cuda=on_cuda)
    return StageCosts(
        activation_bytes=sizes.saved + sizes.output,
        # The output and its gradient are freed before the backward of the last block.
        recompute_bytes=max(0, sizes.running - sizes.output),
        buffer_bytes=sizes.stream,
    )


def stage_bytes(plan: RunPlan, stage: Stage, *, on_cuda: bool = False) -> StageBytes:
    """Return the sizes per micro-batch on a stage."""
    compute, samples, edge = BYTES[stage.root.compute], plan.batch.samples, plan.edge
    stream = math.prod(edge.shape) // plan.mesh.size(*(axis for shard in edge.shards for axis in shard.axes))
    kept = recompute = 0
    for kind, _ in plan.held(stage):
        if kind.saved is None:
            continue
        context, saved = kept_by_context(plan, kind), kind.saved
        if on_cuda:
            saved = saved.on_cuda(more=attention_weights(plan, kind))
        kept += saved.under(kind.recompute) + context.under(kind.recompute)
        if kind.recompute != RecomputePolicy.NONE:
            # At most: the block saves all but its input again, and selective recomputation has kept some of it.
            recompute = max(recompute, saved.none - stream * compute + context.none)
    output = sum(_output_bytes(plan, plan.kind(name)) for name in stage.after)
    inside = max((_gradients_inside(plan, plan.kind(name)) for name in stage.kinds), default=0) if on_cuda else 0
    running = samples * (recompute + inside + (stream * compute if on_cuda else 0))
    return StageBytes(samples * kept, running, output, samples * stream * compute)


def _gradients_inside(plan: RunPlan, kind: LayerSpec) -> int:
    """Return the bytes per sample of the largest gradients that a block's backward holds at once: those of two factors
    of its widest tensor, such as a gated feed-forward layer's, or of attention's weights. Experts' rows are per token.
    """
    rows = 1 if kind.experts is None else kind.experts.top_k
    shapes = [plan.local_shape(one) for one in kind.parameters if len(one.shape) > 1]
    widest = max((shape[-2] * (rows if len(shape) > 2 else 1) for shape in shapes), default=0)
    return 2 * max(plan.rank_tokens * widest * BYTES[plan.edge.dtype], attention_weights(plan, kind))


def attention_weights(plan: RunPlan, kind: LayerSpec) -> int:
    """Return the bytes per sample of the weights that attention keeps on CUDA where PyTorch has no fused kernel: none
    takes float64, nor float32 with fewer heads of keys than of queries."""
    layer, dtype = kind.attention, plan.edge.dtype
    if layer is None or layer.axes or layer.mask.window is not None:
        return 0
    is_grouped = layer.num_kv_heads < layer.num_heads
    if not (dtype == "float64" or (dtype == "float32" and is_grouped)):
        return 0
    return layer.num_heads // plan.mesh.size(*plan.mesh.view("tp")) * plan.batch.tokens**2 * BYTES[dtype]


LIVE_LOGITS = 3
"""Tensors of the output's size that live at once in the backward of cross-entropy: the logarithms of probabilities, and
the gradients with respect to them and to the output. Over a sharded vocabulary also the probabilities."""


def _output_bytes(plan: RunPlan, kind: LayerSpec) -> int:
    """Return the bytes of an end's output with its gradient, per micro-batch."""
    live = LIVE_LOGITS + any(style.kind is StyleKind.HEAD for _, style in kind.styles)
    found = plan.batch.samples * live * kind.output_elements * max(4, BYTES[plan.edge.dtype])
    for feature in plan_features(plan=plan):
        if (part := kind.part(feature.part)) is not None:
            found = feature.output_bytes(plan, kind, part, found)
    return found


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
        total += (len(far) + 1 if far else len(line)) * ERROR_CODEC.encoded_bytes(sizes.num_trained)
    if num_replicas > 1:  # one per shard sent, and one for the sum of the local shard
        total += (num_replicas + 1) * ERROR_CODEC.encoded_bytes(-(-sizes.num_trained // num_replicas))
    return total


MERGE_ROWS = 7
"""Numbers per query and head that a merge keeps: each side's logsumexp, weight and share, and the sum of weights."""


def kept_by_context(plan: RunPlan, kind: LayerSpec) -> SavedBytes:
    """Return the bytes per sample on the rank that keeps the most, as if each sample were one document.

    Received keys and values count, but nothing that attention without context parallelism keeps too.
    """
    layer = kind.attention
    if layer is None or not layer.axes:
        return SavedBytes(0, 0, 0)
    from meshwright.plan.context.layers import attention_dims, batch_shards  # only where cp shards tokens

    dims = attention_dims(layer, plan.mesh, plan.edge.dtype)
    if layer.method is ContextMethod.HEADS:
        # The output of all tokens for some heads, and what it becomes: that of some tokens for all heads. Selective
        # recomputation keeps the result of each all-to-all.
        output = plan.rank_tokens * dims.token_bytes(dims.num_heads)
        inputs = plan.rank_tokens * dims.token_bytes(dims.num_heads + 2 * dims.num_kv_heads)
        return SavedBytes(output, inputs + output, 0)
    return _most_of_ring(layer.mask, batch_shards(plan, None), plan.batch.tokens, plan.rank_tokens, dims)


@lru_cache(maxsize=256)
def _most_of_ring(
    mask: MaskSpec, shards: tuple[Shard, ...], tokens: int, rank_tokens: int, dims: AttentionDims
) -> SavedBytes:
    """Return the bytes of the ring's rank that keeps the most."""
    from meshwright.plan.context.exchange import make_exchange  # only where cp shards tokens

    exchange = make_exchange(mask, shards, tokens)
    distances = exchange.distances()
    found = [_of_ring(exchange, distances, rank, rank_tokens, dims) for rank in range(exchange.num_ranks)]
    return SavedBytes(max(one.none for one in found), max(one.selective for one in found), 0)


def _of_ring(exchange: Exchange, every: tuple[int, ...], rank: int, num_tokens: int, dims: AttentionDims) -> SavedBytes:
    """Return the bytes of a rank: received keys and values, and per distance its output before and after merging."""
    distances = sum(any(exchange.at_distance(rank, distance)) for distance in every)
    if not distances:
        return SavedBytes(0, 0, 0)
    # Results are merged in at least float32; narrower ones are kept before and after they are widened.
    wide = max(4, dims.element_bytes)
    elements, rows = num_tokens * dims.num_heads * dims.head_dim, num_tokens * dims.num_heads
    narrow = (distances + 1) * elements * dims.element_bytes if dims.element_bytes < wide else 0
    merges = distances * (2 * elements + MERGE_ROWS * rows) * wide + narrow
    received = exchange.num_received(rank) * dims.token_bytes(2 * dims.num_kv_heads)
    results = distances * (elements * dims.element_bytes + rows * wide)
    return SavedBytes(received + merges, received + results, 0)
