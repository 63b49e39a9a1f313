"""Memory of one rank, predicted by type from the config alone.

Exact for what is stored between steps; activations are counted operation by operation for a block as it stands, and
the two gathered blocks are what FSDP2 holds at once while it prefetches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from meshwright.config.schema import RunConfig
from meshwright.mesh.axes import Axes
from meshwright.models.spec import LlamaSpec

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

    def total(self) -> int:
        """All types together; the Python process and its libraries come on top."""
        return sum(getattr(self, field.name) for field in fields(self))


def predict_memory(config: RunConfig) -> MemoryEstimate:
    """Predict the peak of one rank, without the Python process and its libraries."""
    axes, spec = config.mesh.axes(), config.model.spec()
    compute = BYTES[config.train.precision]
    master = max(4, compute)
    stored = _stored(spec, axes)
    block, embeddings = spec.params_per_layer() // axes.tp, spec.vocab_size * spec.dim // axes.tp
    is_sharded = axes.data_parallel() > 1
    gathered = 2 * (2 * block + embeddings) * compute if is_sharded else 0
    if is_sharded and not config.mesh.reshard_after_forward:
        gathered += max(0, spec.num_layers - 2) * block * compute
    return MemoryEstimate(
        parameters=stored * master,
        gradients=stored * master,
        optimizer=OPTIMIZER_MOMENTS * stored * master,
        gathered=gathered,
        activations=_activations(config, compute),
    )


def _stored(spec: LlamaSpec, axes: Axes) -> int:
    """Parameters on the rank that holds most of them.

    Tensor parallel divides the rows or the columns of matrices and leaves norms whole; FSDP2 divides the rows that
    are left, and gives its first ranks one more where they do not divide evenly.
    """
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    by_rows = [(rows, spec.dim) for rows in (queries, keys, keys, spec.ffn_dim, spec.ffn_dim)]
    by_columns = [(spec.dim, queries), (spec.dim, spec.ffn_dim)]
    norms = [(spec.dim, 1)] * 2
    embeddings = [(spec.vocab_size, spec.dim)] * (1 if spec.tie_embeddings else 2)
    matrices = spec.num_layers * by_rows + embeddings
    pieces = [(rows // axes.tp, columns) for rows, columns in matrices]
    pieces += spec.num_layers * [(rows, columns // axes.tp) for rows, columns in by_columns]
    pieces += spec.num_layers * norms + norms[:1]
    return sum(math.ceil(rows / axes.dp_shard) * columns for rows, columns in pieces)


def _activations(config: RunConfig, compute: int) -> int:
    """Bytes that one micro-batch's forward leaves for its backward, and the logits with their gradient."""
    axes, spec, train = config.mesh.axes(), config.model.spec(), config.train
    tokens = train.global_batch // (axes.data_parallel() * train.num_microbatches) * train.seq_len
    stream = 1 / axes.tp if config.mesh.sequence_parallel else 1.0
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim / axes.tp
    # Per token: two block inputs and two norm outputs in the stream (norms and residuals; whole again before the
    # products), queries, keys and values before and after rotation, the attention output, four of the
    # feed-forward's width.
    per_token = (2 + 2 * stream) * spec.dim + 2 * heads + spec.num_heads * spec.head_dim / axes.tp
    per_token += 4 * spec.ffn_dim / axes.tp
    logits = 2 * spec.vocab_size / axes.tp * max(4, compute)
    return int(tokens * (spec.num_layers * per_token * compute + logits))
