"""Damage to context parallelism: its gradient reductions, exchanges, masks, positions and shards of tokens.

Each function damages a built job before its first step, never the reference; `context_faults` says what must be found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.nn.attention.core import AttentionCore
from meshwright.nn.attention.module import Attention
from meshwright.nn.attention.rope import RotaryEmbedding, rope_tables
from meshwright.nn.attention.token_indices import shard_indices
from meshwright.nn.attention.token_layout import TokenLayout
from meshwright.parallel.context import ring
from meshwright.parallel.data_parallel import fsdp_modules
from meshwright.plan.context.layers import contiguous
from meshwright.prove.record.layout_run import Tamper
from meshwright.train import train_step as step_module
from meshwright.train.build_job import Job
from meshwright.train.train_step import TrainStep
from tests.prove.seeded_faults import OwnChunk


def position(job: Job) -> int:
    """This rank's place on the axis cp."""
    return job.axes.coordinate(job.context.rank)["cp"]


def on_rank(rank: int, tamper: Tamper) -> Tamper:
    """Damage one cp rank only."""
    return lambda job, step: tamper(job, step) if position(job) == rank else None


# ---- sums of gradients


@dataclass
class Weighted(OwnChunk):
    """A reduce-scatter that weighs the contributions of the ranks of its group, in a part of its output."""

    weights: Callable[[int, int], list[float]]
    """Weights, given this rank's place in the group and the number of ranks."""
    part: tuple[int | None, int | None] = (None, None)
    """Start and end."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: object, async_op: bool = False
    ) -> None:
        rank, size, num_ranks = dist.get_rank(group), output_tensor.numel(), dist.get_world_size(group)
        everything = [torch.empty_like(input_tensor) for _ in range(num_ranks)]
        dist.all_gather(everything, input_tensor, group=group)
        chunks = torch.stack([one[rank * size : (rank + 1) * size] for one in everything])
        output_tensor.copy_(chunks.sum(0))
        weights = torch.tensor(self.weights(rank, num_ranks), dtype=chunks.dtype)
        part = slice(*self.part)
        output_tensor[part] = (weights @ chunks)[part]


def sums(weights: Callable[[int, int], list[float]], *, unit: str | None = None, parameter: str = "") -> Tamper:
    """Weigh the contributions to the gradients of all units, of one, or of one parameter in it."""

    def tamper(job: Job, step: TrainStep) -> None:
        for module in fsdp_modules(job.model) if unit is None else [_unit(job, unit)]:
            part = _part(module, parameter, job) if parameter else (None, None)
            module.set_custom_reduce_scatter(Weighted(weights, part))

    return tamper


def _unit(job: Job, name: str) -> Any:
    return next(m for part in job.parts().values() for path, m in part.module.named_modules() if path == name)


def _part(module: Any, parameter: str, job: Job) -> tuple[int, int]:
    num_shards, start = job.axes.dp_shard * job.axes.cp, 0
    for name, value in module.named_parameters():
        size = value.numel() // num_shards
        if name == parameter:
            return start, start + size
        start += size
    raise AssertionError(f"{parameter} is not in the unit")


def own(rank: int, num_ranks: int) -> list[float]:
    return [float(other == rank) for other in range(num_ranks)]


def same_cp_rank_of_2(rank: int, num_ranks: int) -> list[float]:
    return [float(other % 2 == rank % 2) for other in range(num_ranks)]


def all_times(factor: float) -> Callable[[int, int], list[float]]:
    return lambda rank, num_ranks: [factor] * num_ranks


def last_times(factor: float) -> Callable[[int, int], list[float]]:
    return lambda rank, num_ranks: [1.0] * (num_ranks - 1) + [factor]


def report_own_loss(job: Job, step: TrainStep) -> None:
    """The loss is reported without the sum over ranks."""
    real = step_module.all_reduce_sum

    def reduce(totals: Tensor) -> Tensor:
        own_loss = totals[0].clone()
        found: Tensor = real(totals)
        return torch.cat((own_loss[None], found[1:])) if totals.dim() else found

    step_module.all_reduce_sum = reduce


def divide_by_cp(job: Job, step: TrainStep) -> None:
    """The loss divisor counts cp ranks as data-parallel ranks."""
    real = step._task.loss_sum
    step._task.loss_sum = lambda out, targets: real(out, targets) / job.axes.cp  # type: ignore[method-assign]


# ---- attention


def layers(job: Job) -> Iterator[Attention]:
    return (m for part in job.parts().values() for m in part.module.modules() if isinstance(m, Attention))


def preparing(change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Tamper:
    """Replace `prepare` of all attention cores, with a dense mask."""

    def tamper(job: Job, step: TrainStep) -> None:
        for layer in layers(job):
            layer.core.backend = "reference"
            layer.core.prepare = change(layer.core.prepare)  # type: ignore[method-assign]

    return tamper


def own_keys_only(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *inputs: replace(real(*inputs), hops=())


def all_keys_of_hops(real: Callable[..., Any]) -> Callable[..., Any]:
    def prepare(*inputs: Any) -> Any:
        prepared = real(*inputs)
        for hop in prepared.hops:
            for mask in hop.masks:
                mask.visible_bst.fill_(True)
        return prepared

    return prepare


def local_mask(real: Callable[..., Any]) -> Callable[..., Any]:
    """Each query sees keys whose place in their rank's shard is not after its own; by heads, so all are there."""

    def prepare(mask: Any, layout: TokenLayout, *rest: Any) -> Any:
        prepared = real(mask, layout, *rest)
        place_t = prepared.received_t % layout.num_tokens
        prepared.mask.visible_bst = (place_t[:, None] >= place_t[None, :])[None]
        return prepared

    return prepare


def received_order(real: Callable[..., Any]) -> Callable[..., Any]:
    """By heads: the mask is that of tokens in their order, but they stay in the order in which they were received."""

    def prepare(mask: Any, layout: TokenLayout, *rest: Any) -> Any:
        prepared = real(mask, layout, *rest)
        in_place = torch.arange(layout.seq_len)
        return replace(prepared, received_t=in_place, token_t=in_place)

    return prepare


def without_documents(real: Callable[..., Any]) -> Callable[..., Any]:
    def prepare(mask: Any, layout: TokenLayout, *rest: Any) -> Any:
        return real(replace(mask, documents=None), replace(layout, documents=None), *rest)

    return prepare


def merge_nothing(job: Job, step: TrainStep) -> None:
    """What arrives from other ranks is not merged into the result."""
    ring.merge = lambda out, lse, other, other_lse: (out + 0.0 * other, lse)


def without_source(rank: int) -> Tamper:
    """What arrives from one rank is not merged into the result."""

    def tamper(job: Job, step: TrainStep) -> None:
        real_entries, real_merge, sources = ring._by_entry, ring.merge, []

        def by_entry(received: Tensor, hop: Any, num_samples: int) -> list[Tensor]:
            sources.append(hop.source)
            return real_entries(received, hop, num_samples)

        def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
            if sources[-1] != rank:
                return real_merge(out, lse, other, other_lse)
            return out + 0.0 * other, lse

        ring._by_entry, ring.merge = by_entry, merge

    return tamper


def received_gradient_times(factor: float, *, only_values: bool = False) -> Tamper:
    """Scale the gradients that are returned for received keys and values."""

    def tamper(job: Job, step: TrainStep) -> None:
        real = ring.RingAttention._start

        def start(self: Any, kv_bs2mh: Tensor, hop: Any) -> Any:
            scaled = factor * kv_bs2mh + (1.0 - factor) * kv_bs2mh.detach()
            if only_values:
                scaled = torch.stack((kv_bs2mh[:, :, 0], scaled[:, :, 1]), dim=2)
            return real(self, scaled, hop)

        ring.RingAttention._start = start  # type: ignore[method-assign]

    return tamper


def scores_times(factor: float) -> Tamper:
    """Scale the scores of attention, which is no fault of cp."""

    def tamper(job: Job, step: TrainStep) -> None:
        for layer in layers(job):
            real: AttentionCore = layer.core
            layer.core = _Scaled(real, factor)  # type: ignore[assignment]

    return tamper


class _Scaled(AttentionCore):
    def __init__(self, real: AttentionCore, factor: float) -> None:
        self.real, self.factor, self.backend = real, factor, real.backend
        self.prepare = real.prepare  # type: ignore[method-assign]

    def __call__(self, q_bsnh: Tensor, k_bsnh: Tensor, v_bsnh: Tensor, mask: Any) -> Tensor:
        return self.real(self.factor * q_bsnh, k_bsnh, v_bsnh, mask)


# ---- positions and shards of tokens


def positions(find: Callable[[TokenLayout], Tensor]) -> Tamper:
    """Give RoPE other positions."""

    class Other(RotaryEmbedding):
        def tables(self, layout: TokenLayout, *, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            return rope_tables(find(layout), self.head_dim, theta=self.theta, scaling=self.scaling, dtype=dtype)

    def tamper(job: Job, step: TrainStep) -> None:
        for module in (m for part in job.parts().values() for m in part.module.modules()):
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
