"""Seeded faults of context parallelism: its gradient reductions, exchanges, masks, positions and shards of tokens.

Each function damages a built job before its first step, never the reference; the tables say on which layouts, and what
the proof must say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.nn.attention.mask_spec import TokenLayout
from meshwright.nn.attention.positions import RotaryEmbedding, rope_tables, shard_indices
from meshwright.nn.transformer_block import Attention
from meshwright.parallel import context_attention
from meshwright.parallel.data_parallel import fsdp_modules
from meshwright.plan.context.layers import contiguous
from meshwright.prove.record.layout_run import Tamper
from meshwright.train import train_step as step_module
from meshwright.train.build_job import Job
from meshwright.train.train_step import TrainStep
from tests.prove.forward_faults import module_of
from tests.prove.seeded_faults import (
    Fault,
    OwnChunk,
    changing,
    drop_all_reduce_of_replicas,
    keep_only_last_microbatch,
    leave_out_of_norm,
    loss_times,
    modules,
    on,
    replacing,
    serve_share_0_everywhere,
)


def on_cp_rank(rank: int, tamper: Tamper) -> Tamper:
    return on(lambda job: job.axes.coordinate(job.context.rank)["cp"] == rank, tamper)


# ---- sums of gradients


@dataclass
class Weighted(OwnChunk):
    """A reduce-scatter that weighs the contributions of the ranks of its group, in a part of its output."""

    weights: Callable[[int, int], list[float]]
    """Weights, given this rank's place in the group and the number of ranks."""
    part: tuple[int | None, int | None] = (None, None)
    """Start and end."""

    def reduce(self, chunks: Tensor, group: Any) -> Tensor:
        rank, everything = dist.get_rank(group), [torch.empty_like(chunks) for _ in chunks]
        dist.all_gather(everything, chunks, group=group)
        mine = torch.stack([one[rank] for one in everything])
        total, part = mine.sum(0), slice(*self.part)
        total[part] = (torch.tensor(self.weights(rank, len(chunks)), dtype=mine.dtype) @ mine)[part]
        return total


def sums(weights: Callable[[int, int], list[float]], *, unit: str | None = None, parameter: str = "") -> Tamper:
    """Weigh the contributions to the gradients of all units, of one, or of one parameter in it."""

    def tamper(job: Job, step: TrainStep) -> None:
        for module in fsdp_modules(job.model) if unit is None else [module_of(job, unit)]:
            part = _part(module, parameter, job) if parameter else (None, None)
            module.set_custom_reduce_scatter(Weighted(weights, part))

    return tamper


def _part(module: Any, parameter: str, job: Job) -> tuple[int, int]:
    sizes = {name: value.numel() // (job.axes.dp_shard * job.axes.cp) for name, value in module.named_parameters()}
    start = sum(list(sizes.values())[: list(sizes).index(parameter)])
    return start, start + sizes[parameter]


def own(rank: int, num_ranks: int) -> list[float]:
    return [float(other == rank) for other in range(num_ranks)]


def same_cp_rank_of_2(rank: int, num_ranks: int) -> list[float]:
    return [float(other % 2 == rank % 2) for other in range(num_ranks)]


def all_times(factor: float) -> Callable[[int, int], list[float]]:
    return lambda rank, num_ranks: [factor] * num_ranks


def last_times(factor: float) -> Callable[[int, int], list[float]]:
    return lambda rank, num_ranks: [1.0] * (num_ranks - 1) + [factor]


def own_loss(job: Job, real: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The loss is reported without the sum over ranks."""

    def reduce(totals: Tensor) -> Tensor:
        own = totals[0].clone()
        found = real(totals)
        return torch.cat((own[None], found[1:])) if totals.dim() else found

    return reduce


# ---- attention


def preparing(change: Callable[[Any, Any, TokenLayout], Any]) -> Tamper:
    """Change what all attention cores prepare for their masks and layouts, with a dense mask."""

    def tamper(job: Job, step: TrainStep) -> None:
        for layer in modules(job, Attention):
            real = layer.core.prepare
            layer.core.backend = "reference"
            layer.core.prepare = lambda mask, layout, *rest, real=real: change(
                lambda mask, layout: real(mask, layout, *rest), mask, layout
            )

    return tamper


def prepared(change: Callable[[Any, TokenLayout], Any]) -> Tamper:
    return preparing(lambda real, mask, layout: change(real(mask, layout), layout))


def all_keys_of_hops(found: Any, layout: TokenLayout) -> Any:
    for mask in (mask for hop in found.hops for mask in hop.masks):
        mask.visible_bst.fill_(True)
    return found


def local_mask(found: Any, layout: TokenLayout) -> Any:
    """Each query sees keys whose place in their rank's shard is not after its own; by heads, so all are there."""
    place_t = found.received_t % layout.num_tokens
    found.mask.visible_bst = (place_t[:, None] >= place_t[None, :])[None]
    return found


def received_order(found: Any, layout: TokenLayout) -> Any:
    """By heads: the mask is that of tokens in their order, but they stay in the order in which they were received."""
    in_place = torch.arange(layout.seq_len)
    return replace(found, received_t=in_place, token_t=in_place)


without_documents = preparing(
    lambda real, mask, layout: real(replace(mask, documents=None), replace(layout, documents=None))
)
merge_nothing = replacing(
    context_attention, "merge", lambda job, real: lambda out, lse, other, other_lse: (out + 0.0 * other, lse)
)
"""What arrives from other ranks is not merged into the result."""


def without_source(rank: int) -> Tamper:
    """What arrives from one rank is not merged into the result."""

    def tamper(job: Job, step: TrainStep) -> None:
        real_entries, real_merge, sources = context_attention._by_entry, context_attention.merge, []

        def by_entry(received: Tensor, hop: Any, num_samples: int) -> list[Tensor]:
            sources.append(hop.source)
            return real_entries(received, hop, num_samples)

        def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
            if sources[-1] != rank:
                return real_merge(out, lse, other, other_lse)
            return out + 0.0 * other, lse

        context_attention._by_entry, context_attention.merge = by_entry, merge

    return tamper


def received_gradient_times(factor: float, *, only_values: bool = False) -> Tamper:
    """Scale the gradients that are returned for received keys and values."""

    def wrap(job: Job, real: Callable[..., Any]) -> Callable[..., Any]:
        def start(self: Any, kv_bs2mh: Tensor, hop: Any) -> Any:
            scaled = factor * kv_bs2mh + (1.0 - factor) * kv_bs2mh.detach()
            if only_values:
                scaled = torch.stack((kv_bs2mh[:, :, 0], scaled[:, :, 1]), dim=2)
            return real(self, scaled, hop)

        return start

    return replacing(context_attention.RingAttention, "_start", wrap)


def scores_times(factor: float) -> Tamper:
    """Scale the scores of attention, which is no fault of cp."""
    return replacing(
        context_attention.RingAttention,
        "__call__",
        lambda job, real: lambda self, q, *rest: real(self, factor * q, *rest),
    )


# ---- positions and shards of tokens


def positions(find: Callable[[TokenLayout], Tensor]) -> Tamper:
    """Give RoPE other positions."""

    class Other(RotaryEmbedding):
        def tables(self, layout: TokenLayout, *, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            return rope_tables(find(layout), self.head_dim, theta=self.theta, scaling=self.scaling, dtype=dtype)

    def tamper(job: Job, step: TrainStep) -> None:
        for module in modules(job):
            for name, value in dict(vars(module)).items():
                if isinstance(value, RotaryEmbedding):
                    setattr(module, name, Other(value.head_dim, value.theta, value.scaling))

    return tamper


def local_positions(layout: TokenLayout) -> Tensor:
    return torch.arange(layout.num_tokens)


def contiguous_positions(layout: TokenLayout) -> Tensor:
    return torch.arange(layout.num_tokens) + layout.rank * layout.num_tokens


@dataclass(frozen=True)
class _OtherTokens:
    batch: Any
    conditions: tuple[Any, ...]
    inputs: Tensor
    targets: Tensor


def reading(find: Callable[[TokenLayout], Tensor], *, inputs: bool = True, targets: bool = True) -> Tamper:
    """Read other tokens than those of masks and positions; `find` returns their indices [s] in a sample."""

    def tamper(job: Job, step: TrainStep) -> None:
        real = step.pipeline.tokens.localize

        def localize(batch: Any) -> Any:
            local = real(batch)
            index = find(next(one for one in local.conditions if isinstance(one, TokenLayout)))
            other = [x[:, index] for x in (batch.inputs, batch.targets)]
            return _OtherTokens(
                batch, local.conditions, other[0] if inputs else local.inputs, other[1] if targets else local.targets
            )

        step.pipeline.tokens.localize = localize  # type: ignore[method-assign]

    return tamper


def tokens_of_rank(rank: int) -> Callable[[TokenLayout], Tensor]:
    def find(layout: TokenLayout) -> Tensor:
        assert layout.shards is not None
        return shard_indices(layout.shards[rank])

    return find


def halves_swapped(layout: TokenLayout) -> Tensor:
    return shard_indices(layout.shard).roll(layout.num_tokens // 2)


def contiguous_tokens(layout: TokenLayout) -> Tensor:
    assert layout.shards is not None
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
    "the sum over cp is missing, not that over dp_shard": Fault(sums(same_cp_rank_of_2), SHARDED,
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
    "RoPE at local positions on cp rank 1": Fault(on_cp_rank(1, positions(local_positions)), SHARDED,
        ("RoPE uses local positions", "only on ranks 1 and 3 (cp = 1)"), WQ),
    "RoPE at local positions in a pipeline": Fault(positions(local_positions), PIPELINE, ("RoPE uses local positions",),
        WQ),
    "RoPE at positions of a contiguous order": Fault(positions(contiguous_positions), HEADS,
        ("RoPE uses positions of consecutive tokens", "balanced order"), WQ),
    # Masks.
    "queries miss the keys of other ranks": Fault(prepared(lambda found, layout: replace(found, hops=())), RING,
        ("queries miss the keys of other cp ranks",), WQ),
    "queries of cp rank 1 miss the keys of other ranks": Fault(on_cp_rank(1, merge_nothing), RING,
        ("queries miss the keys of other cp ranks", "only on rank 1"), WQ),
    "keys of cp rank 2 are lost": Fault(without_source(2), RING3,
        ("keys and values of cp rank 2 don't reach the other cp ranks",), WQ),
    "keys of cp rank 1 are lost on cp rank 0": Fault(on_cp_rank(0, without_source(1)), RING3,
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
    "gradients of keys and values are not returned to cp rank 1": Fault(on_cp_rank(1, received_gradient_times(0.0)),
        RING, ("gradients of keys are not returned", "only on rank 1"), WQ),
    # Tokens.
    "targets are sharded in another order": Fault(reading(contiguous_tokens, inputs=False), RING,
        ("inputs and targets are sharded apart", "targets: tokens are in a contiguous order"), WQ),
    "two ranks hold the same tokens": Fault(on_cp_rank(1, reading(tokens_of_rank(0))), RING,
        ("cp rank 1 holds the tokens of cp rank 0, which are there twice", "only on rank 1",), EMBED),
    "tokens of cp rank 1 are swapped": Fault(on_cp_rank(1, reading(halves_swapped)), RING, ("halves swapped",
        "only on rank 1"), EMBED),
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
    "scores are a tenth too large": Fault(scores_times(1.1), RING, ("the output of blocks.0.attention.core",
        "so the fault is in it"), WQ),
}  # fmt: skip
"""Faults under cp of something else, whose cause may not speak of cp."""
