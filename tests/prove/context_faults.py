"""Seeded faults of context parallelism: on which layouts, and what the proof must say about them."""

from __future__ import annotations

from meshwright.mesh.local_shards import to_local
from meshwright.prove.record.layout_run import Tamper
from meshwright.train.build_job import Job
from tests.prove.context_damage import (
    all_keys_of_hops,
    all_times,
    contiguous_positions,
    contiguous_tokens,
    divide_by_cp,
    halves_swapped,
    last_times,
    local_mask,
    local_positions,
    merge_nothing,
    on_rank,
    own,
    own_keys_only,
    positions,
    preparing,
    reading,
    received_gradient_times,
    received_order,
    report_own_loss,
    same_cp_rank_of_2,
    scores_times,
    sums,
    tokens_of_rank,
    without_documents,
    without_source,
)
from tests.prove.seeded_faults import (
    Fault,
    after_backward,
    drop_all_reduce_of_replicas,
    keep_only_last_microbatch,
    leave_out_of_norm,
    serve_share_0_everywhere,
)

RING = ("mesh.cp=2", "mesh.cp_method=ring")
HEADS = ("mesh.cp=2", "mesh.cp_method=heads")
SHARDED = (*RING, "mesh.dp_shard=2")
RING3 = ("mesh.cp=3", "mesh.cp_method=ring", "train.seq_len=12")
PIPELINE = (*RING, "mesh.pp=2", "pipeline.schedule=1f1b", "train.num_microbatches=2")
ZB_V = (*RING, "mesh.pp=2", "pipeline.schedule=zb-v", "model.num_layers=4", "train.num_microbatches=4")
TWICE = (*RING, "train.num_microbatches=2")
DOCUMENTS = (*RING, "data.packing=documents")
UP, WQ, NORM = "blocks.1.ffn.up.weight", "blocks.0.attention.wq.weight", "blocks.1.ffn_norm.weight"
EMBED = "embed.weight"


def times(name: str, factor: float) -> Tamper:
    def scale(job: Job) -> None:
        to_local(job.model.get_parameter(name).grad).mul_(factor)  # type: ignore[arg-type]

    return after_backward(scale)


CONTEXT_FAULTS: dict[str, Fault] = {
    # Gradients.
    "the sum over cp is missing": Fault(
        sums(own), RING, ("the sum over cp is missing", "each rank holds only its local contribution"), UP
    ),
    "the sum over cp is missing, not that over dp_shard": Fault(
        sums(same_cp_rank_of_2),
        SHARDED,
        ("the sum over cp is missing", "contributions at its own cp coordinate"),
        UP,
    ),
    "the sums over dp_shard and cp are missing": Fault(
        sums(own), SHARDED, ("the sum over dp_shard and cp is missing",), UP
    ),
    "the sum over cp of one unit is missing": Fault(
        sums(own, unit="blocks.1"), RING, ("the sum over cp is missing", "of 21 gradients"), UP
    ),
    "the sum over cp of one norm is missing": Fault(
        sums(own, unit="blocks.1", parameter="ffn_norm.weight"),
        RING,
        (f"✗ {NORM} each rank holds only its local contribution", "the sum over cp is missing"),
        NORM,
    ),
    "the sum over cp is done twice": Fault(
        sums(all_times(2.0)), RING, ("2.000 × the reference", "summed over cp (2 ranks) once more"), UP
    ),
    "the sum over cp of one unit is done twice": Fault(
        sums(all_times(3.0), unit="blocks.1"),
        RING3,
        ("3.000 × the reference", "summed over cp (3 ranks) once more"),
        UP,
    ),
    "the sum over cp of one norm is done twice": Fault(
        times(NORM, 2.0), RING, (f"✗ {NORM} 2.000 × the reference", "summed over cp (2 ranks) once more"), NORM
    ),
    "the sum over cp is done twice, by heads with documents": Fault(
        sums(all_times(2.0)),
        (*HEADS, "data.packing=documents"),
        ("2.000 × the reference", "summed over cp (2 ranks) once more"),
        UP,
    ),
    "the sum over cp is done twice in zb-v": Fault(
        sums(all_times(2.0)), ZB_V, ("2.000 × the reference", "or over cp (2 ranks)"), UP
    ),
    "the last cp rank is left out": Fault(
        sums(last_times(0.0)), RING3, ("the contribution of cp rank 2 is missing",), UP
    ),
    "the last cp rank is counted twice": Fault(sums(last_times(2.0)), RING, ("cp rank 1 counted twice",), UP),
    "the loss divisor counts cp ranks": Fault(
        divide_by_cp, HEADS, ("0.500 × the reference", "averaged over cp (2 ranks) instead of summed"), UP
    ),
    "the reported loss is not summed over cp": Fault(
        report_own_loss, RING, ("ranks report different losses", "the sum over cp is missing")
    ),
    # Positions.
    "RoPE at local positions": Fault(
        positions(local_positions), RING, ("RoPE uses local positions", "places in the cp rank's shard"), WQ
    ),
    "RoPE at local positions on cp rank 1": Fault(
        on_rank(1, positions(local_positions)), SHARDED, ("RoPE uses local positions", "cp rank 1 (ranks 1 and 3)"), WQ
    ),
    "RoPE at local positions in a pipeline": Fault(
        positions(local_positions), PIPELINE, ("RoPE uses local positions",), WQ
    ),
    "RoPE at positions of a contiguous order": Fault(
        positions(contiguous_positions), HEADS, ("RoPE uses positions of consecutive tokens", "balanced order"), WQ
    ),
    # Masks.
    "queries miss the keys of other ranks": Fault(
        preparing(own_keys_only), RING, ("queries miss the keys of other cp ranks",), WQ
    ),
    "queries of cp rank 1 miss the keys of other ranks": Fault(
        on_rank(1, merge_nothing), RING, ("queries miss the keys of other cp ranks", "cp rank 1 (rank 1)"), WQ
    ),
    "keys of cp rank 2 are lost": Fault(
        without_source(2), RING3, ("keys and values of cp rank 2 don't reach the other cp ranks",), WQ
    ),
    "keys of cp rank 1 are lost on cp rank 0": Fault(
        on_rank(0, without_source(1)), RING3, ("keys and values of cp rank 1 don't reach cp rank 0",), WQ
    ),
    "received keys are not masked": Fault(
        preparing(all_keys_of_hops), RING, ("keys of other cp ranks are not masked",), WQ
    ),
    "the mask is at local positions": Fault(
        preparing(local_mask), HEADS, ("the mask is evaluated at local positions",), WQ
    ),
    "tokens stay in the order received": Fault(
        preparing(received_order), HEADS, ("takes the tokens of each cp rank for consecutive ones",), WQ
    ),
    "documents are ignored": Fault(
        preparing(without_documents), DOCUMENTS, ("documents are ignored under cp", "attend across documents"), WQ
    ),
    # Gradients of keys and values.
    "gradients of keys and values are not returned": Fault(
        received_gradient_times(0.0), RING, ("gradients of keys and values are not returned to the cp rank",), WQ
    ),
    "gradients of keys and values are returned twice": Fault(
        received_gradient_times(2.0), RING, ("gradients of keys and values are returned twice",), WQ
    ),
    "gradients of values are not returned": Fault(
        received_gradient_times(0.0, only_values=True), RING, ("gradients of values are not returned",), WQ
    ),
    "gradients of keys and values are not returned to cp rank 1": Fault(
        on_rank(1, received_gradient_times(0.0)),
        RING,
        ("gradients of keys and values are not returned", "cp rank 1 (rank 1)"),
        WQ,
    ),
    # Tokens.
    "targets are sharded in another order": Fault(
        reading(contiguous_tokens, inputs=False),
        RING,
        ("inputs and targets of cp ranks are sharded apart", "targets in a contiguous order"),
        WQ,
    ),
    "two ranks hold the same tokens": Fault(
        on_rank(1, reading(tokens_of_rank(0))),
        RING,
        ("cp rank 1 (rank 1) holds the tokens of cp rank 0, which are there twice",),
        EMBED,
    ),
    "tokens of cp rank 1 are swapped": Fault(
        on_rank(1, reading(halves_swapped)), RING, ("halves swapped", "cp rank 1 (rank 1)"), EMBED
    ),
}

NEAR_MISSES: dict[str, Fault] = {
    "the sum over dp_replicate is missing": Fault(
        drop_all_reduce_of_replicas, (*RING, "mesh.dp_replicate=2"), ("the sum over dp_replicate is missing",), UP
    ),
    "a parameter is left out of the norm": Fault(
        leave_out_of_norm, (*RING, "mesh.tp=2"), ("left out of the norm", "blocks.0.ffn.down.weight")
    ),
    "a gradient is counted three times": Fault(
        times(UP, 3.0), RING, ("3.000 × the reference", "a factor that no axis"), UP
    ),
    "accumulation is overwritten": Fault(keep_only_last_microbatch, TWICE, ("only the last micro-batch",), UP),
    "a data-parallel rank reads another's samples": Fault(
        serve_share_0_everywhere, SHARDED, ("read the samples of data-parallel rank 0",), UP
    ),
    "scores are a tenth too large": Fault(scores_times(1.1), RING, ("not recognised",), WQ),
}
"""Faults under cp of something else, whose cause may not speak of cp."""
