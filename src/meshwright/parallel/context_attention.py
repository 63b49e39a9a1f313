"""Context parallelism: attention layers exchange keys and values, or heads.

Ring attention (Liu et al. 2023, "Ring attention with blockwise transformers for near-infinite context"): each rank
attends to its own keys while those of others travel, then to what arrives from each distance, and merges the results by
their logsumexps, as in online softmax (Milakov and Gimelshein 2018). Only visible keys are sent, once, and kept for the
backward, which returns their gradients.

By heads (Jacobs et al. 2023, "DeepSpeed-Ulysses"): all-to-alls turn shards of tokens into shards of heads and back.

Shapes: b batch, s tokens on this rank, t tokens of a full sample, n heads, h head_dim, R ranks; m tokens received
from a rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from meshwright.comm.alltoallv import AllToAllHandle, all_to_all, start_all_to_all
from meshwright.comm.collectives import world_size
from meshwright.nn.attention.attention import (
    PLAIN,
    AttentionCore,
    ScoreRules,
    attention,
    attention_with_lse,
    with_sinks,
)
from meshwright.nn.attention.attention_mask import AttentionMask
from meshwright.nn.attention.backend import AttentionRequest
from meshwright.nn.attention.mask_spec import MaskSpec, TokenLayout
from meshwright.nn.attention.positions import shard_indices
from meshwright.nn.experts.router import SampleCounts
from meshwright.parallel.expert_dispatch import SumOver
from meshwright.parallel.rank_model import context_group, take_tokens
from meshwright.plan.context.exchange import Intervals, count, local_rows, make_exchange
from meshwright.plan.run_plan import ContextMethod, RunPlan, Stage


@dataclass(frozen=True)
class _Hop:
    """Exchange with the ranks at one distance."""

    rows: tuple[Tensor, ...]
    """Rows of this rank's tokens to send, per entry."""
    target: int
    source: int
    received: tuple[int, ...]
    """Tokens received, per entry."""
    masks: tuple[AttentionMask | None, ...]
    """Mask between this rank's queries and the received keys, per entry; None where there are none."""


@dataclass(frozen=True)
class RingMask:
    """Masks and rows of a micro-batch, per entry: one for all samples if they are alike, or one for each."""

    own: tuple[AttentionMask, ...]
    hops: tuple[_Hop, ...]


class RingAttention(AttentionCore):
    """Attention over tokens that a process group shards."""

    def __init__(self, group: ProcessGroup, *, backend: str = "auto") -> None:
        self.group, self.backend = group, backend

    def prepare(
        self, mask: MaskSpec, layout: TokenLayout, device: torch.device, request: AttentionRequest | None = None
    ) -> RingMask:
        """Return the masks of this rank's queries, and what it sends and receives."""
        assert layout.shards is not None, "the layout is a rank's"
        exchange = make_exchange(mask, layout.shards, layout.seq_len)
        request = None if request is None else replace(request, needs_lse=True)
        own, shard = layout.rank, layout.shards[layout.rank]
        held = tuple(shard[min(entry, len(shard) - 1)] for entry in range(exchange.num_entries))

        def between(entry: int, keys: Intervals) -> AttentionMask:
            """Return the mask between this rank's queries and some keys of an entry."""
            rules = mask if mask.documents is None else replace(mask, documents=(mask.documents[entry],))
            return AttentionMask.at(
                rules, layout.seq_len, (held[entry],), (keys,), device=device, backend=self.backend, request=request
            )

        hops = []
        for distance in exchange.distances():
            target, source = (own + distance) % exchange.num_ranks, (own - distance) % exchange.num_ranks
            keys = exchange.tokens[own][source]
            rows = (local_rows(*one) for one in zip(exchange.tokens[target][own], held, strict=True))
            sent = tuple(shard_indices((one,)).to(device) for one in rows)
            masks = tuple(between(entry, one) if one else None for entry, one in enumerate(keys))
            hops.append(_Hop(sent, target, source, tuple(map(count, keys)), masks))
        return RingMask(tuple(between(*one) for one in enumerate(held)), tuple(hops))

    def __call__(
        self, q_bsnh: Tensor, k_bsnh: Tensor, v_bsnh: Tensor, mask: RingMask, scores: ScoreRules = PLAIN
    ) -> Tensor:
        """Return the output [b, s, n, h]."""
        own_entries = _entries(q_bsnh, k_bsnh, v_bsnh, mask.own)
        if not mask.hops:
            return _join([attention(*one, mask=own, scores=scores) for one, own in own_entries])
        kv_bs2mh = torch.stack((k_bsnh, v_bsnh), dim=2)
        transfers = [self._start(kv_bs2mh, hop) for hop in mask.hops]
        parts = [attention_with_lse(*one, mask=own, scores=scores) for one, own in own_entries]
        # Sums of several parts are accumulated in at least float32.
        merged = [(out.to(lse.dtype), lse) for out, lse in parts]
        for hop, transfer in zip(mask.hops, transfers, strict=True):
            received = transfer.wait()
            queries = (q_bsnh,) if len(merged) == 1 else torch.split(q_bsnh, 1)
            for entry, keys in enumerate(_by_entry(received, hop, q_bsnh.shape[0])):
                merged[entry] = _attend(queries[entry], keys, hop.masks[entry], scores, *merged[entry])
        if scores.sinks_n is not None:
            merged = [(with_sinks(out, lse, scores.sinks_n), lse) for out, lse in merged]
        return _join([out for out, _ in merged]).to(q_bsnh.dtype)

    def _start(self, kv_bs2mh: Tensor, hop: _Hop) -> AllToAllHandle:
        if len(hop.rows) == 1:
            sent = kv_bs2mh.index_select(1, hop.rows[0]).flatten(0, 1)
            num_received = kv_bs2mh.shape[0] * hop.received[0]
        else:
            sent = torch.cat([one.index_select(0, rows) for one, rows in zip(kv_bs2mh, hop.rows, strict=True)])
            num_received = sum(hop.received)
        send, recv = [0] * world_size(self.group), [0] * world_size(self.group)
        send[hop.target], recv[hop.source] = sent.shape[0], num_received
        # The number of hops depends on the group's documents, so other groups would take other turns.
        return start_all_to_all(sent, send_splits=send, recv_splits=recv, group=self.group, switches=False)


def _entries(
    q_bsnh: Tensor, k_bsnh: Tensor, v_bsnh: Tensor, masks: tuple[AttentionMask, ...]
) -> list[tuple[tuple[Tensor, Tensor, Tensor], AttentionMask]]:
    """Return the inputs of each entry with its mask."""
    if len(masks) == 1:
        return [((q_bsnh, k_bsnh, v_bsnh), masks[0])]
    by_sample = (torch.split(x, 1) for x in (q_bsnh, k_bsnh, v_bsnh))
    return list(zip(zip(*by_sample, strict=True), masks, strict=True))


def _by_entry(received_m2nh: Tensor, hop: _Hop, num_samples: int) -> list[Tensor]:
    """Return the received keys and values [b, m, 2, n, h] of each entry."""
    if len(hop.received) == 1:
        return [received_m2nh.view(num_samples, hop.received[0], *received_m2nh.shape[1:])]
    return [one[None] for one in torch.split(received_m2nh, list(hop.received))]


def _attend(
    q_bsnh: Tensor, kv_bm2nh: Tensor, mask: AttentionMask | None, scores: ScoreRules, out_bsnh: Tensor, lse_bns: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge the attention to received keys into a result. Without keys the result depends on them all the same: their
    owner waits for gradients."""
    if mask is None:
        return out_bsnh + kv_bm2nh.sum(), lse_bns
    out, lse = attention_with_lse(q_bsnh, kv_bm2nh[:, :, 0], kv_bm2nh[:, :, 1], mask=mask, scores=scores)
    return merge(out_bsnh, lse_bns, out.to(lse.dtype), lse)


def _join(outs: list[Tensor]) -> Tensor:
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def merge(out_a_bsnh: Tensor, lse_a_bns: Tensor, out_b_bsnh: Tensor, lse_b_bns: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and lse of attention over both sets of keys; differentiable in all arguments.

    Rows without keys have an lse of -inf and don't contribute, also not to gradients. The result is computed in the
    dtype of lse and returned in the outputs' promoted dtype: give float32 outputs to accumulate many.
    """
    # A constant shift: it cancels in the result, so it needs no gradient.
    shift = torch.maximum(lse_a_bns, lse_b_bns).detach()
    shift = shift.masked_fill(shift == -math.inf, 0)
    weight_a, weight_b = (lse_a_bns - shift).exp(), (lse_b_bns - shift).exp()
    total = weight_a + weight_b
    hidden = total == 0
    total = total.masked_fill(hidden, 1)
    lse_bns = (shift + total.log()).masked_fill(hidden, -math.inf)
    share_a, share_b = ((weight / total).transpose(1, 2)[..., None] for weight in (weight_a, weight_b))
    out = share_a * out_a_bsnh + share_b * out_b_bsnh
    return out.to(torch.promote_types(out_a_bsnh.dtype, out_b_bsnh.dtype)), lse_bns


@dataclass(frozen=True)
class HeadsMask:
    """Mask of full samples, and their order after the all-to-all."""

    mask: AttentionMask
    received_t: Tensor
    """Place of each token of a sample among the received ones, [t] or [b, t]."""
    token_t: Tensor
    """Token at each place, the inverse."""


class HeadsAttention(AttentionCore):
    """Attention over tokens that a process group shards, with all tokens of some heads on each rank."""

    def __init__(self, group: ProcessGroup, *, backend: str = "auto") -> None:
        self.group, self.backend = group, backend

    def prepare(
        self, mask: MaskSpec, layout: TokenLayout, device: torch.device, request: AttentionRequest | None = None
    ) -> HeadsMask:
        """Return the mask of full samples."""
        assert layout.shards is not None, "the layout is a rank's"
        token_t = torch.cat([shard_indices(shard) for shard in layout.shards], dim=-1)
        prepared = AttentionMask(mask, layout.seq_len, device=device, backend=self.backend, request=request)
        return HeadsMask(prepared, token_t.argsort(-1).to(device), token_t.to(device))

    def __call__(
        self, q_bsnh: Tensor, k_bsnh: Tensor, v_bsnh: Tensor, mask: HeadsMask, scores: ScoreRules = PLAIN
    ) -> Tensor:
        """Return the output [b, s, n, h]."""
        num_ranks, num_samples = world_size(self.group), q_bsnh.shape[0]
        if scores.sinks_n is not None:
            own_n = scores.sinks_n.chunk(num_ranks)[self.group.rank()]
            scores = replace(scores, sinks_n=own_n)
        by_rank = [torch.unflatten(x, 2, (num_ranks, -1)) for x in (q_bsnh, k_bsnh, v_bsnh)]
        sizes = [x.shape[3] for x in by_rank]
        rows = self._exchange(torch.cat(by_rank, dim=3).permute(2, 0, 1, 3, 4))
        full_btmh = rows.transpose(0, 1).flatten(1, 2)
        q, k, v = torch.split(take_tokens(full_btmh, mask.received_t), sizes, dim=2)
        out_btnh = take_tokens(attention(q, k, v, mask=mask.mask, scores=scores), mask.token_t)
        out = self._exchange(torch.unflatten(out_btnh, 1, (num_ranks, -1)).transpose(0, 1))
        return out.permute(1, 2, 0, 3, 4).reshape(num_samples, q_bsnh.shape[1], *q_bsnh.shape[2:])

    def _exchange(self, x_Rbsnh: Tensor) -> Tensor:
        """Send each rank its part, and return the parts received, in order of ranks."""
        num_ranks, rows = x_Rbsnh.shape[0], x_Rbsnh.shape[1] * x_Rbsnh.shape[2]
        splits = [rows] * num_ranks
        out = all_to_all(x_Rbsnh.flatten(0, 2), send_splits=splits, recv_splits=splits, group=self.group)
        return out.view(x_Rbsnh.shape)


def apply_context(module: nn.Module, mesh: DeviceMesh, plan: RunPlan, stage: Stage) -> None:
    """Let the attention layers of a stage's module attend to the tokens of all context-parallel ranks, and routers
    count them, in place."""
    group = context_group(mesh, plan)
    for kind, layer in plan.held(stage):
        if kind.attention is not None:
            owner = module.get_submodule(kind.full_name(kind.attention.module, layer))
            assert isinstance(owner.core, AttentionCore), "`AttentionFacts.module` has a core"
            assert kind.attention.method is not None, "a plan with cp has a method for every attention layer"
            made = HeadsAttention if kind.attention.method is ContextMethod.HEADS else RingAttention
            owner.core = made(group, backend=owner.core.backend)  # type: ignore[assignment]
    for inner in module.modules():
        if isinstance(inner, SampleCounts):
            inner.num_parts, inner.reduce = world_size(group), SumOver(mesh, plan.mesh.view("cp"))
