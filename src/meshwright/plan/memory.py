"""Memory of one rank, predicted by type from the config alone.

Exact for what is stored between steps; activations are counted operation by operation for a block as it stands, and
the two gathered blocks are what FSDP2 holds at once while it prefetches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from meshwright.config.pipeline import layers_per_stage, lowered_table
from meshwright.config.schema import RunConfig
from meshwright.mesh.axes import Axes
from meshwright.models.spec import LlamaSpec
from meshwright.pipeline.costs import Costs, StageCosts
from meshwright.pipeline.simulate import PeakBytes, simulate

BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
OPTIMIZER_MOMENTS = 2


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank, the one that holds most, by type."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    """Parameters of the blocks that are whole on this rank at once, and their gradients."""
    activations: int
    """Of all micro-batches that are under way at once."""
    buffers: int
    """For what comes from other stages."""

    def total(self) -> int:
        """All types together; the Python process and its libraries come on top."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class _Stage:
    """What a stage has of the model."""

    num_layers: int
    is_first: bool
    is_last: bool


def predict_memory(config: RunConfig) -> MemoryEstimate:
    """Predict the peak of one rank, without the Python process and its libraries."""
    schedule = lowered_table(config)
    counts = layers_per_stage(config)
    stages = [_Stage(count, i == 0, i == len(counts) - 1) for i, count in enumerate(counts)]
    costs = Costs([_stage_costs(config, stage) for stage in stages])
    peaks = simulate(schedule, costs).peak_bytes
    estimates = [
        _on_rank(config, [stages[stage] for stage in schedule.stages_of(rank)], peak)
        for rank, peak in enumerate(peaks)
    ]  # fmt: skip
    return max(estimates, key=MemoryEstimate.total)


def _on_rank(config: RunConfig, stages: list[_Stage], peak: PeakBytes) -> MemoryEstimate:
    axes, spec = config.mesh.axes(), config.model.spec()
    compute = BYTES[config.train.precision]
    master = max(4, compute)
    stored = sum(_stored(spec, axes, stage) for stage in stages)
    num_layers = sum(stage.num_layers for stage in stages)
    block, embeddings = spec.params_per_layer() // axes.tp, spec.vocab_size * spec.dim // axes.tp
    is_sharded = axes.data_parallel() > 1
    gathered = 2 * (min(2, num_layers) * block + embeddings) * compute if is_sharded else 0
    if is_sharded and not config.mesh.reshard_after_forward:
        gathered += max(0, num_layers - 2) * block * compute
    return MemoryEstimate(
        parameters=stored * master,
        gradients=stored * master,
        optimizer=OPTIMIZER_MOMENTS * stored * master,
        gathered=gathered,
        activations=peak.activations + peak.retained + peak.recompute,
        buffers=peak.buffers,
    )


def _stored(spec: LlamaSpec, axes: Axes, stage: _Stage) -> int:
    """A stage's parameters on the rank that holds most of them.

    Tensor parallel divides the rows or the columns of matrices and leaves norms whole; FSDP2 divides the rows that
    are left, and gives its first ranks one more where they do not divide evenly.
    """
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    by_rows = [(rows, spec.dim) for rows in (queries, keys, keys, spec.ffn_dim, spec.ffn_dim)]
    by_columns = [(spec.dim, queries), (spec.dim, spec.ffn_dim)]
    norms = [(spec.dim, 1)] * 2
    is_shared = spec.tie_embeddings and stage.is_first and stage.is_last
    embeddings = [(spec.vocab_size, spec.dim)] * (1 if is_shared else stage.is_first + stage.is_last)
    matrices = stage.num_layers * by_rows + embeddings
    pieces = [(rows // axes.tp, columns) for rows, columns in matrices]
    pieces += stage.num_layers * [(rows, columns // axes.tp) for rows, columns in by_columns]
    pieces += stage.num_layers * norms + norms[: stage.is_last]
    return sum(math.ceil(rows / axes.dp_shard) * columns for rows, columns in pieces)


def _stage_costs(config: RunConfig, stage: _Stage) -> StageCosts:
    """Bytes of one micro-batch on a stage: what its forward leaves for its backward, and the logits with their
    gradient."""
    axes, spec, train = config.mesh.axes(), config.model.spec(), config.train
    compute = BYTES[train.precision]
    tokens = train.global_batch // (axes.data_parallel() * train.num_microbatches) * train.seq_len
    stream = 1 / axes.tp if config.mesh.sequence_parallel else 1.0
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim / axes.tp
    # Per token: two block inputs and two norm outputs in the stream (norms and residuals; whole again before the
    # products), queries, keys and values before and after rotation, the attention output, four of the
    # feed-forward's width.
    per_token = (2 + 2 * stream) * spec.dim + 2 * heads + spec.num_heads * spec.head_dim / axes.tp
    per_token += 4 * spec.ffn_dim / axes.tp
    block = tokens * per_token * compute
    kept, recompute = (stage.num_layers * block, 0.0)
    if config.recompute.policy == "full":
        kept, recompute = stage.num_layers * tokens * stream * spec.dim * compute, block if stage.num_layers else 0.0
    logits = 2 * tokens * spec.vocab_size / axes.tp * max(4, compute) if stage.is_last else 0.0
    return StageCosts(
        activation_bytes=int(kept + logits),
        recompute_bytes=int(recompute),
        buffer_bytes=int(tokens * stream * spec.dim * compute),
    )
