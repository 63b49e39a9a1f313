"""Memory of one rank, predicted by type from the config alone.

Exact for what is stored between steps; activations are counted operation by operation for a block as it stands, and
the two gathered blocks are what FSDP2 holds at once while it prefetches.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from meshwright.config.pipeline import layers_per_stage, lowered_table
from meshwright.config.schema import RunConfig
from meshwright.models.shapes import Part
from meshwright.models.spec import LlamaSpec, ModelSpec
from meshwright.pipeline.costs import Costs, StageCosts
from meshwright.pipeline.simulate import PeakBytes, simulate
from meshwright.pipeline.stages import layer_ranges
from meshwright.plan.errors import error_bytes
from meshwright.plan.fsdp_units import trained_shapes
from meshwright.plan.messages import BYTES, Place, place_of

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
    errors: int
    """Of error feedback."""

    def total(self) -> int:
        """All types together; the Python process and its libraries come on top."""
        return sum(getattr(self, field.name) for field in fields(self))


def predict_memory(config: RunConfig, *, ranks_per_node: int | None = None) -> MemoryEstimate:
    """Predict the peak of one rank, without the Python process and its libraries.

    Args:
        config: of the run.
        ranks_per_node: as of `traffic.predict_traffic`.
    """
    ranges = layer_ranges(layers_per_stage(config))
    parts = [Part(layers, stage=stage, num_stages=len(ranges)) for stage, layers in enumerate(ranges)]
    peaks = simulate(lowered_table(config), Costs([_stage_costs(config, part) for part in parts])).peak_bytes
    size = config.mesh.axes().num_ranks() // config.mesh.pp
    places = (place_of(config, position * size, ranks_per_node=ranks_per_node) for position in range(config.mesh.pp))
    return max((_on_rank(place, peak) for place, peak in zip(places, peaks, strict=True)), key=MemoryEstimate.total)


def _on_rank(place: Place, peak: PeakBytes) -> MemoryEstimate:
    config, parts = place.config, place.parts()
    axes = config.mesh.axes()
    compute = BYTES[config.train.precision]
    master = max(4, compute)
    sizes = [
        (shape.on_rank(tp=axes.tp, dp_shard=axes.dp_shard), is_trained)
        for part in parts
        for shape, is_trained in trained_shapes(config, part).items()
    ]
    stored, trained = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
    num_layers = sum(len(part.layers) for part in parts)
    gathered = 0
    if axes.data_parallel() > 1:
        block, others = _gathered_parts(config)
        gathered = 2 * (min(2, num_layers) * block + others) * compute
        if not config.mesh.reshard_after_forward or config.comm.secondary_shards:
            # What stays of the others from forward to backward: whole, or among a few ranks.
            gathered += max(0, num_layers - 2) * block * compute // (config.comm.secondary_shards or 1)
    return MemoryEstimate(
        parameters=stored * master,
        gradients=trained * master,
        optimizer=OPTIMIZER_MOMENTS * trained * master,
        gathered=gathered,
        activations=peak.activations + peak.retained + peak.recompute,
        buffers=peak.buffers,
        errors=error_bytes(place),
    )


def _gathered_parts(config: RunConfig) -> tuple[int, int]:
    """Elements of a block, and of the larger of what else a stage gathers at once, whole but for tensor parallel."""
    spec, tp = config.model.spec(), config.mesh.tp
    if isinstance(spec, LlamaSpec):
        return spec.params_per_layer() // tp, spec.vocab_size * spec.dim // tp
    return spec.params_per_layer() // tp, spec.embedder_params()


def _stage_costs(config: RunConfig, part: Part) -> StageCosts:
    """Bytes of one micro-batch on a stage: what its forward leaves for its backward, and the output with its
    gradient."""
    axes, spec, train = config.mesh.axes(), config.model.spec(), config.train
    compute = BYTES[train.precision]
    tokens = train.global_batch // (axes.data_parallel() * train.num_microbatches) * config.tokens_a_sample()
    stream = 1 / axes.tp if config.mesh.sequence_parallel else 1.0
    block = tokens * _kept_per_token(spec, tp=axes.tp, stream=stream) * compute
    num_layers = len(part.layers)
    kept, recompute = (num_layers * block, 0.0)
    if config.recompute.policy == "full":
        kept, recompute = num_layers * tokens * stream * spec.dim * compute, block if num_layers else 0.0
    outputs = spec.vocab_size / axes.tp if isinstance(spec, LlamaSpec) else float(spec.patch_dim())
    output = 2 * tokens * outputs * max(4, compute) if part.is_last else 0.0
    return StageCosts(
        activation_bytes=int(kept + output),
        recompute_bytes=int(recompute),
        buffer_bytes=int(tokens * stream * spec.dim * compute),
    )


def _kept_per_token(spec: ModelSpec, *, tp: int, stream: float) -> float:
    """Elements that a block's forward leaves for its backward, for each token; `stream`: the part a rank has of it."""
    queries = spec.num_heads * spec.head_dim
    if isinstance(spec, LlamaSpec):
        # Two block inputs and two norm outputs in the stream (norms and residuals; whole again before the products),
        # queries, keys and values before and after rotation, the attention output, four of the feed-forward's width.
        heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim / tp
        return (2 + 2 * stream) * spec.dim + 2 * heads + queries / tp + 4 * spec.ffn_dim / tp
    # Of each half: its input, the norm's output, the modulated one, and what the gate multiplies; queries, keys, values
    # and the attention output; the feed-forward before and after its GELU.
    return 8 * spec.dim + 4 * queries / tp + 2 * spec.ffn_dim / tp
