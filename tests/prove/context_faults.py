"""Seeded faults of context parallelism: its gradient reductions, exchanges, masks, positions and shards of tokens.

Each function damages a built job before its first step, never the reference; the tables say on which layouts, and what
the proof must say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from meshwright.nn.attention.mask_spec import TokenLayout
from meshwright.nn.attention.positions import shard_indices
from meshwright.nn.transformer_block import Attention
from meshwright.parallel import context_attention
from meshwright.parallel.data_parallel import fsdp_modules
from meshwright.plan.context.layers import contiguous
from meshwright.train import train_step as step_module
from tests.prove.forward_faults import module_of, positions, scores_times
from tests.prove.seeded_faults import (
    Fault,
    OwnChunk,
    changing,
    drop_all_reduce_of_replicas,
    each,
    keep_only_last_microbatch,
    leave_out_of_norm,
    loss_times,
    on_axis,
    replacing,
    serve_share_0_everywhere,
    taking,
    wrapping,
)

# ---- sums of gradients


@dataclass
class Weighted(OwnChunk):
    """A reduce-scatter that weighs the contributions of the ranks of its group, in a part of its output."""

    weights: Any
    """Weights, given this rank's place in the group and the number of ranks."""
    start: int
    end: int | None

    def reduce(self, chunks, group):
        rank, everything = dist.get_rank(group), [torch.empty_like(chunks) for _ in chunks]
        dist.all_gather(everything, chunks, group=group)
        mine = torch.stack([one[rank] for one in everything])
        total, part = mine.sum(0), slice(self.start, self.end)
        total[part] = (torch.tensor(self.weights(rank, len(chunks)), dtype=mine.dtype) @ mine)[part]
        return total


def sums(weights, *, unit=None, parameter=""):
    """Weigh the contributions to the gradients of all units, of one, or of one parameter in it."""

    def tamper(job, step):
        for module in fsdp_modules(job.model) if unit is None else [module_of(job, unit)]:
            sizes = {n: p.numel() // (job.axes.dp_shard * job.axes.cp) for n, p in module.named_parameters()}
            start = sum(list(sizes.values())[: list(sizes).index(parameter)]) if parameter else 0
            module.set_custom_reduce_scatter(Weighted(weights, start, start + sizes[parameter] if parameter else None))

    return tamper


def own(rank, num_ranks):
    return [float(other == rank) for other in range(num_ranks)]


def all_times(factor):
    return lambda rank, num_ranks: [factor] * num_ranks


def last_times(factor):
    return lambda rank, num_ranks: [1.0] * (num_ranks - 1) + [factor]


def own_loss(job, real):
    """The loss is reported without the sum over ranks."""

    def reduce(totals):
        own = totals[:1].clone() if totals.dim() else None
        found = real(totals)
        return found if own is None else torch.cat((own, found[1:]))

    return reduce


# ---- attention


def preparing(change):
    """Change what all attention cores prepare for their masks and layouts, with a dense mask."""

    def damage(job, layer):
        real, layer.core.backend = layer.core.prepare, "reference"
        layer.core.prepare = lambda mask, layout, *rest: change(lambda m, one: real(m, one, *rest), mask, layout)

    return each(Attention, damage)


def prepared(change):
    return preparing(lambda real, mask, layout: change(real(mask, layout), layout))


def all_keys_of_hops(found, layout):
    for mask in (mask for hop in found.hops for mask in hop.masks):
        mask.visible_bst.fill_(True)
    return found


def local_mask(found, layout):
    """Each query sees keys whose place in their rank's shard is not after its own; by heads, so all are there."""
    place_t = found.received_t % layout.num_tokens
    found.mask.visible_bst = (place_t[:, None] >= place_t[None, :])[None]
    return found


def received_order(found, layout):
    """By heads: the mask is that of tokens in their order, but they stay in the order in which they were received."""
    in_place = torch.arange(layout.seq_len)
    return replace(found, received_t=in_place, token_t=in_place)


without_documents = preparing(
    lambda real, mask, layout: real(replace(mask, documents=None), replace(layout, documents=None))
)


def without_source(*ranks):
    """What arrives from some ranks is not merged into the result."""

    def tamper(job, step):
        real_entries, real_merge, sources = context_attention._by_entry, context_attention.merge, []

        def by_entry(received, hop, num_samples):
            sources.append(hop.source)
            return real_entries(received, hop, num_samples)

        def merge(out, lse, other, other_lse):
            return (out + 0.0 * other, lse) if sources[-1] in ranks else real_merge(out, lse, other, other_lse)

        context_attention._by_entry, context_attention.merge = by_entry, merge

    return tamper


def received_gradient_times(factor, *, only_values=False):
    """Scale the gradients that are returned for received keys and values."""

    def scaled(job, core, kv_bs2mh, hop):
        scaled = factor * kv_bs2mh + (1.0 - factor) * kv_bs2mh.detach()
        if only_values:
            scaled = torch.stack((kv_bs2mh[:, :, 0], scaled[:, :, 1]), dim=2)
        return core, scaled, hop

    return replacing(context_attention.RingAttention, "_start", taking(scaled))


# ---- positions and shards of tokens


def local_positions(layout):
    return torch.arange(layout.num_tokens)


def reading(find, *, inputs=True):
    """Read other targets, and inputs, than those of masks and positions; `find` returns indices [s] in a sample."""

    def change(job, real):
        def localize(batch):
            local = real(batch)
            index = find(next(one for one in local.conditions if isinstance(one, TokenLayout)))
            read = batch.inputs[:, index] if inputs else local.inputs
            targets = batch.targets[:, index]
            return SimpleNamespace(batch=batch, conditions=local.conditions, inputs=read, targets=targets)

        return localize

    return wrapping("step.pipeline.tokens.localize", change)


def contiguous_tokens(layout):
    return shard_indices((contiguous(layout.seq_len, len(layout.shards))[layout.rank],))


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


CONTEXT_FAULTS: dict[str, Fault] = {
    # Gradients.
    "the sum over cp is missing": Fault(sums(own), RING, ("the sum over cp is missing",
        "each rank holds only its local contribution"), UP),
    "the sum over cp is missing, not that over dp_shard": Fault(sums(lambda rank, num_ranks:
        [float(other % 2 == rank % 2) for other in range(num_ranks)]), SHARDED,
        ("the sum over cp is missing", "contributions at its own cp coordinate"), UP),
    "the sums over dp_shard and cp are missing": Fault(sums(own), SHARDED, ("the sum over dp_shard and cp is missing",),
        UP),
    "the sum over cp of one unit is missing": Fault(sums(own, unit="blocks.1"), RING, ("the sum over cp is missing",
        "of 21 gradients"), UP),
    "the sum over cp of one norm is missing": Fault(sums(own, unit="blocks.1", parameter="ffn_norm.weight"), RING,
        (f"✗ {NORM} each rank holds only its local contribution", "the sum over cp is missing"), NORM),
    "the sum over cp is done twice": Fault(sums(all_times(2.0)), RING, ("2.000 × the reference",
        "summed over cp (2 ranks) once more"), UP),
    "the sum over cp of one unit is done twice": Fault(sums(all_times(3.0), unit="blocks.1"), RING3,
        ("3.000 × the reference", "summed over cp (3 ranks) once more"), UP),
    "the sum over cp of one norm is done twice": Fault(changing(NORM, lambda g: g.mul_(2.0)), RING,
        (f"✗ {NORM} 2.000 × the reference", "summed over cp (2 ranks) once more"), NORM),
    "the sum over cp is done twice, by heads with documents": Fault(sums(all_times(2.0)), (*HEADS,
        "data.packing=documents"), ("2.000 × the reference", "summed over cp (2 ranks) once more"), UP),
    "the sum over cp is done twice in zb-v": Fault(sums(all_times(2.0)), ZB_V, ("2.000 × the reference",
        "or over cp (2 ranks)"), UP),
    "the last cp rank is left out": Fault(sums(last_times(0.0)), RING3, ("the contribution of cp rank 2 is missing",),
        UP),
    "the last cp rank is counted twice": Fault(sums(last_times(2.0)), RING, ("cp rank 1 counted twice",), UP),
    "the loss divisor counts cp ranks": Fault(loss_times(lambda job: 1 / job.axes.cp), HEADS, ("0.500 × the reference",
        "averaged over cp (2 ranks) instead of summed"), UP),
    "the reported loss is not summed over cp": Fault(replacing(step_module, "all_reduce_sum", own_loss), RING,
        ("ranks report different losses", "the sum over cp is missing")),
    # Positions.
    "RoPE at local positions": Fault(positions(local_positions), RING, ("RoPE uses local positions",
        "places in the cp rank's shard"), WQ),
    "RoPE at local positions on cp rank 1": Fault(on_axis("cp", 1, positions(local_positions)), SHARDED,
        ("RoPE uses local positions", "only on ranks 1 and 3 (cp = 1)"), WQ),
    "RoPE at local positions in a pipeline": Fault(positions(local_positions), PIPELINE, ("RoPE uses local positions",),
        WQ),
    "RoPE at positions of a contiguous order": Fault(positions(lambda layout:
        torch.arange(layout.num_tokens) + layout.rank * layout.num_tokens), HEADS,
        ("RoPE uses positions of consecutive tokens", "balanced order"), WQ),
    # Masks.
    "queries miss the keys of other ranks": Fault(prepared(lambda found, layout: replace(found, hops=())), RING,
        ("queries miss the keys of other cp ranks",), WQ),
    "queries of cp rank 1 miss the keys of other ranks": Fault(on_axis("cp", 1, without_source(0)), RING,
        ("queries miss the keys of other cp ranks", "only on rank 1"), WQ),
    "keys of cp rank 2 are lost": Fault(without_source(2), RING3,
        ("keys and values of cp rank 2 don't reach the other cp ranks",), WQ),
    "keys of cp rank 1 are lost on cp rank 0": Fault(on_axis("cp", 0, without_source(1)), RING3,
        ("keys and values of cp rank 1 don't reach cp rank 0",), WQ),
    "received keys are not masked": Fault(prepared(all_keys_of_hops), RING, ("keys of other cp ranks are not masked",),
        WQ),
    "the mask is at local positions": Fault(prepared(local_mask), HEADS, ("the mask is evaluated at local positions",),
        WQ),
    "tokens stay in the order received": Fault(prepared(received_order), HEADS,
        ("takes the tokens of each cp rank for consecutive ones",), WQ),
    "documents are ignored": Fault(without_documents, DOCUMENTS, ("documents are ignored", "attend across documents"),
        WQ),
    # Gradients of keys and values.
    "gradients of keys and values are not returned": Fault(received_gradient_times(0.0), RING,
        ("gradients of keys are not returned to the cp rank",), WQ),
    "gradients of keys and values are returned twice": Fault(received_gradient_times(2.0), RING,
        ("gradients of keys are returned twice",), WQ),
    "gradients of values are not returned": Fault(received_gradient_times(0.0, only_values=True), RING,
        ("gradients of values are not returned",), WQ),
    "gradients of keys and values are not returned to cp rank 1": Fault(on_axis("cp", 1, received_gradient_times(0.0)),
        RING, ("gradients of keys are not returned", "only on rank 1"), WQ),
    # Tokens.
    "targets are sharded in another order": Fault(reading(contiguous_tokens, inputs=False), RING,
        ("inputs and targets are sharded apart", "targets: tokens are in a contiguous order"), WQ),
    "two ranks hold the same tokens": Fault(on_axis("cp", 1, reading(lambda layout: shard_indices(layout.shards[0]))),
        RING, ("cp rank 1 holds the tokens of cp rank 0, which are there twice", "only on rank 1",), EMBED),
    "tokens of cp rank 1 are swapped": Fault(on_axis("cp", 1, reading(lambda layout: shard_indices(layout.shard).roll(
        layout.num_tokens // 2))), RING, ("halves swapped", "only on rank 1"), EMBED),
}  # fmt: skip

NEAR_MISSES: dict[str, Fault] = {
    "the sum over dp_replicate is missing": Fault(drop_all_reduce_of_replicas, (*RING, "mesh.dp_replicate=2"),
        ("the sum over dp_replicate is missing",), UP),
    "a parameter is left out of the norm": Fault(leave_out_of_norm, (*RING, "mesh.tp=2"), ("left out of the norm",
        "blocks.0.ffn.down.weight")),
    "a gradient is counted three times": Fault(changing(UP, lambda g: g.mul_(3.0)), RING, ("3.000 × the reference",
        "a factor that no axis"), UP),
    "accumulation is overwritten": Fault(keep_only_last_microbatch, TWICE, ("only the last micro-batch",),
        "head.weight"),
    "a data-parallel rank reads another's samples": Fault(serve_share_0_everywhere, SHARDED,
        ("given those of ranks 0 and 1",), UP),
    "scores are a tenth too large": Fault(scores_times(1.1, context_attention.RingAttention), RING,
        ("the output of blocks.0.attention.core", "so the fault is in it"), WQ),
}  # fmt: skip
"""Faults under cp of something else, whose cause may not speak of cp."""
