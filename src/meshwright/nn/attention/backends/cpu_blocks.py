"""Block-sparse attention on CPU: PyTorch's fused kernel on the blocks of a mask that are not empty.

A mask is given by bounds: each query sees the keys whose positions are in one interval, which holds for every
`MaskSpec`, on any part of a sample in any order. They are tensors of fixed shape, and blocks are found inside an
operator, so compiled code sees neither lengths nor blocks, and never recompiles for other documents.

The gradient of lse costs no extra pass. With P the weights, dS = P ∘ (dP - delta + dlse), where the fused kernel
computes delta as the row sums of dO ∘ O. An extra column of ones in dO and of -dlse in O, with zeros in Q, K and V,
changes delta to delta - dlse and nothing else.

Shapes: b batch, s queries, t keys, n heads, m key/value heads, h head_dim, r rows of a block: its queries, for each
query head of a key/value head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten

MAX_DENSE_PAIRS = 1 << 19
"""Up to this many pairs in a batch, one call with a dense mask beats a call per block."""
NARROW_KEYS = 512
"""Mean of visible keys up to which narrow blocks of queries waste less than the kernel loses on them."""
NARROW_ROWS, WIDE_ROWS = 64, 256
"""Queries of a block; from 192 rows on, the kernel's own blocks are twice as high."""


@dataclass(frozen=True)
class Block:
    """Queries that are computed together, and the range of keys that covers all they see."""

    samples: slice
    queries: slice
    keys: slice
    visible: np.ndarray[Any, np.dtype[np.bool_]] | None
    """Visible pairs, [samples or 1, queries, keys]; None if all are."""

    def bias(self, groups: int, like: Tensor) -> Tensor | None:
        """Return the visible pairs as terms of the scores, [samples or 1, 1, r, t]."""
        if self.visible is None:
            return None
        hidden = torch.from_numpy(~self.visible)[:, None].repeat(1, 1, groups, 1)
        return torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, -math.inf)


def find_blocks(first_bs: Tensor, last_bs: Tensor, positions_bt: Tensor, batch: int) -> Iterator[Block]:
    """Yield the blocks of a mask that are not empty.

    Args:
        first_bs: position of the first visible key of each query, for all samples or for each.
        last_bs: position after the last visible key, likewise.
        positions_bt: position of each key, likewise.
        batch: number of samples.
    """
    first, last, positions = first_bs.numpy(), last_bs.numpy(), positions_bt.numpy()
    num_queries, num_keys = first.shape[1], positions.shape[1]
    if batch * num_queries * num_keys <= MAX_DENSE_PAIRS:
        visible = _visible(first, last, positions)
        everything = slice(0, num_queries), slice(0, num_keys)
        yield Block(slice(None), *everything, None if visible.all() else visible)
        return
    for sample in range(first.shape[0]):
        samples = slice(None) if first.shape[0] == 1 else slice(sample, sample + 1)
        yield from _sample_blocks(samples, first[sample], last[sample], positions[sample])


def _sample_blocks(samples: slice, first: Any, last: Any, positions: Any) -> Iterator[Block]:
    num_rows = NARROW_ROWS if (last - first).mean() <= NARROW_KEYS else WIDE_ROWS
    for start in range(0, len(first), num_rows):
        queries = slice(start, min(start + num_rows, len(first)))
        needed = np.flatnonzero((positions >= first[queries].min()) & (positions < last[queries].max()))
        if needed.size:
            keys = slice(int(needed[0]), int(needed[-1]) + 1)
            visible = _visible(first[None, queries], last[None, queries], positions[None, keys])
            if visible.any():
                yield Block(samples, queries, keys, None if visible.all() else visible)


def _visible(first: Any, last: Any, positions: Any) -> Any:
    positions = positions[:, None]
    return (first[..., None] <= positions) & (positions < last[..., None])


@torch.library.custom_op("meshwright::block_attention", mutates_args=())
def block_attention(
    q_bsnh: Tensor,
    k_btmh: Tensor,
    v_btmh: Tensor,
    first_bs: Tensor,
    last_bs: Tensor,
    positions_bt: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return outputs [b, s, n, h], and lse [b, n, s] in at least float32; differentiable in both.

    A query without visible keys gets outputs of 0 and an lse of -inf. `find_blocks` describes the bounds.
    """
    out, lse = _empty_results(q_bsnh)
    out.zero_()
    lse.fill_(-math.inf)
    num_kv_heads = k_btmh.shape[2]
    groups = q_bsnh.shape[2] // num_kv_heads
    for block in find_blocks(first_bs, last_bs, positions_bt, len(q_bsnh)):
        rows, keys = (block.samples, block.queries), (block.samples, block.keys)
        bias = block.bias(groups, q_bsnh)
        out_bmrh, lse_bmr = aten._scaled_dot_product_flash_attention_for_cpu(
            _folded(q_bsnh[rows], num_kv_heads), k_btmh[keys].transpose(1, 2), v_btmh[keys].transpose(1, 2),
            attn_mask=bias, scale=scale,
        )  # fmt: skip
        if bias is not None:
            hidden = (bias == -math.inf).all(-1)
            lse_bmr = lse_bmr.masked_fill(hidden, -math.inf)
            out_bmrh = out_bmrh.masked_fill(hidden[..., None], 0)
        out[rows] = _unfolded(out_bmrh, groups)
        lse[block.samples, :, block.queries] = lse_bmr.unflatten(2, (groups, -1)).flatten(1, 2)
    return out, lse


@torch.library.custom_op("meshwright::block_attention_backward", mutates_args=())
def block_attention_backward(
    grad_out: Tensor, grad_lse: Tensor | None, q_bsnh: Tensor, k_btmh: Tensor, v_btmh: Tensor, out_bsnh: Tensor,
    lse_bns: Tensor, first_bs: Tensor, last_bs: Tensor, positions_bt: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of queries, keys and values. Keys and values are accumulated in at least float32."""
    dq = torch.zeros(q_bsnh.shape, dtype=q_bsnh.dtype)
    dk, dv = (torch.zeros(x.shape, dtype=lse_bns.dtype) for x in (k_btmh, v_btmh))
    num_kv_heads, head_dim = k_btmh.shape[2:]
    groups = q_bsnh.shape[2] // num_kv_heads
    # A row without keys: exp(-inf - inf) is 0, where exp(-inf + inf) is not a number.
    lse_bns = lse_bns.masked_fill(lse_bns == -math.inf, math.inf)
    ends: tuple[Tensor | float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0)
    if grad_lse is not None:
        ends = (1.0, 0.0, 0.0, 0.0, -grad_lse.transpose(1, 2)[..., None])
        whole = (grad_out, q_bsnh, k_btmh, v_btmh, out_bsnh)
        grad_out, q_bsnh, k_btmh, v_btmh, out_bsnh = map(_with_column, whole, ends)
    for block in find_blocks(first_bs, last_bs, positions_bt, len(q_bsnh)):
        rows, keys = (block.samples, block.queries), (block.samples, block.keys)
        dq_bmrh, dk_bmth, dv_bmth = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _folded(grad_out[rows], num_kv_heads), _folded(q_bsnh[rows], num_kv_heads),
            k_btmh[keys].transpose(1, 2), v_btmh[keys].transpose(1, 2), _folded(out_bsnh[rows], num_kv_heads),
            lse_bns[block.samples, :, block.queries].unflatten(1, (num_kv_heads, groups)).flatten(2), 0.0, False,
            attn_mask=block.bias(groups, q_bsnh), scale=scale,
        )  # fmt: skip
        dq[rows] = _unfolded(dq_bmrh, groups)[..., :head_dim]
        dk[keys] += dk_bmth.transpose(1, 2)[..., :head_dim]
        dv[keys] += dv_bmth.transpose(1, 2)[..., :head_dim]
    return dq, dk.to(k_btmh.dtype), dv.to(v_btmh.dtype)


def _empty_results(q_bsnh: Tensor) -> tuple[Tensor, Tensor]:
    b, s, n, _ = q_bsnh.shape
    exact = torch.promote_types(q_bsnh.dtype, torch.float32)
    out = torch.empty(q_bsnh.shape, dtype=q_bsnh.dtype, device=q_bsnh.device)
    return out, torch.empty(b, n, s, dtype=exact, device=q_bsnh.device)


def _folded(x_bsnh: Tensor, num_kv_heads: int) -> Tensor:
    """Return [b, m, r, h]: the query heads of a key/value head below each other, so that they share its keys."""
    return x_bsnh.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _unfolded(x_bmrh: Tensor, groups: int) -> Tensor:
    """Undo `_folded`."""
    return x_bmrh.unflatten(2, (groups, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _with_column(x: Tensor, end: Tensor | float) -> Tensor:
    """Append a column to the last dimension."""
    if isinstance(end, float):
        return F.pad(x, (0, 1), value=end)
    return torch.cat((x, end.to(x.dtype)), -1)


@block_attention.register_fake
def _fake_forward(q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, positions: Tensor, scale: float) -> Any:
    return _empty_results(q)


@block_attention_backward.register_fake
def _fake_backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: object
) -> tuple[Tensor, ...]:
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, first, last, positions, out, lse = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    grads = block_attention_backward(grad_out, grad_lse, q, k, v, out, lse, first, last, positions, ctx.scale)
    return *grads, None, None, None, None


block_attention.register_autograd(_backward, setup_context=_setup_context)
