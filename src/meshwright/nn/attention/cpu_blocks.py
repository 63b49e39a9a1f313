"""Block-sparse attention on CPU: PyTorch's fused kernel on the blocks of a mask that are not empty.

A mask is given by bounds: each query sees the keys whose positions are in one interval, which holds for every
`MaskSpec`, on any part of a sample in any order. They are tensors of fixed shape, and blocks are found inside an
operator, so compiled code sees neither lengths nor blocks, and never recompiles for other documents. Consecutive blocks
with the same pattern, as in a window, form a run, which is a single call of the kernel.

The gradient of lse costs no extra pass. With P the weights, dS = P ∘ (dP - delta + dlse), where the fused kernel
computes delta as the row sums of dO ∘ O. An extra column of ones in dO and of -dlse in O, with zeros in Q, K and V,
changes delta to delta - dlse and nothing else.

Shapes: b batch, s queries, t keys, n heads, m key/value heads, h head_dim; of a run of blocks, c samples and blocks, r
rows: queries of a block, for each query head of a key/value head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

aten = torch.ops.aten


@torch.library.custom_op("meshwright::block_attention", mutates_args=())
def block_attention(
    q_bsnh: Tensor, k_btmh: Tensor, v_btmh: Tensor, first_bs: Tensor, last_bs: Tensor, positions_bt: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return outputs [b, s, n, h], and lse [b, n, s] in at least float32; differentiable in both.

    A query without visible keys gets outputs of 0 and an lse of -inf. `BlockFinder.find` describes the bounds.
    """
    out_bsnh, lse_bns = _empty_results(q_bsnh)
    out_bsnh.zero_()
    lse_bns.fill_(-math.inf)
    num_kv_heads = k_btmh.shape[2]
    finder = BlockFinder(q_bsnh.shape[2] // num_kv_heads, q_bsnh.dtype)
    for run in finder.find(first_bs, last_bs, positions_bt, len(q_bsnh)):
        # The kernel counts rows to tell which keys are hidden, so heads that share keys can't be below each other.
        groups = finder.groups if run.is_causal else 1
        k, v = (_keys(x, run, groups) for x in (k_btmh, v_btmh))
        out_cmrh, lse_cmr = aten._scaled_dot_product_flash_attention_for_cpu(
            _rows(q_bsnh, run, num_kv_heads * groups), k, v, 0.0, run.is_causal, attn_mask=run.bias, scale=scale
        )
        if run.pattern is not None and run.pattern.hidden is not None:
            lse_cmr = lse_cmr.masked_fill(run.pattern.hidden, -math.inf)
            out_cmrh = out_cmrh.masked_fill(run.pattern.hidden[..., None], 0)
        _store(out_bsnh, run, out_cmrh)
        _store(lse_bns.transpose(1, 2)[..., None], run, lse_cmr[..., None])
    return out_bsnh, lse_bns


@torch.library.custom_op("meshwright::block_attention_backward", mutates_args=())
def block_attention_backward(
    grad_out: Tensor, grad_lse: Tensor | None, q_bsnh: Tensor, k_btmh: Tensor, v_btmh: Tensor, out_bsnh: Tensor,
    lse_bns: Tensor, first_bs: Tensor, last_bs: Tensor, positions_bt: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of queries, keys and values. Keys and values are accumulated in at least float32."""
    dq = torch.zeros(q_bsnh.shape, dtype=q_bsnh.dtype)
    dk, dv = (torch.zeros(x.shape, dtype=lse_bns.dtype) for x in (k_btmh, v_btmh))
    num_kv_heads, head_dim = k_btmh.shape[2:]
    # A row without keys: exp(-inf - inf) is 0, where exp(-inf + inf) is not a number.
    lse_bsn1 = lse_bns.masked_fill(lse_bns == -math.inf, math.inf).transpose(1, 2)[..., None]
    if grad_lse is not None:
        q_bsnh, k_btmh, v_btmh = (F.pad(x, (0, 1)) for x in (q_bsnh, k_btmh, v_btmh))
        grad_out = F.pad(grad_out, (0, 1), value=1.0)
        out_bsnh = torch.cat((out_bsnh, -grad_lse.transpose(1, 2)[..., None].to(out_bsnh.dtype)), -1)
    finder = BlockFinder(q_bsnh.shape[2] // num_kv_heads, q_bsnh.dtype)
    for run in finder.find(first_bs, last_bs, positions_bt, len(q_bsnh)):
        groups = finder.groups if run.is_causal else 1
        grad, q, out, lse = (_rows(x, run, num_kv_heads * groups) for x in (grad_out, q_bsnh, out_bsnh, lse_bsn1))
        k, v = (_keys(x, run, groups) for x in (k_btmh, v_btmh))
        dq_cmrh, *dkv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse.squeeze(-1), 0.0, run.is_causal, attn_mask=run.bias, scale=scale
        )
        _store(dq, run, dq_cmrh[..., :head_dim])
        for total, part_cmth in zip((dk, dv), dkv, strict=True):
            part = part_cmth[..., :head_dim]
            _add(total, run, part if groups == 1 else part.unflatten(1, (-1, groups)).sum(2))
    return dq, dk.to(k_btmh.dtype), dv.to(v_btmh.dtype)


def _empty_results(q_bsnh: Tensor) -> tuple[Tensor, Tensor]:
    b, s, n, _ = q_bsnh.shape
    exact = torch.promote_types(q_bsnh.dtype, torch.float32)
    return q_bsnh.new_empty(q_bsnh.shape), q_bsnh.new_empty((b, n, s), dtype=exact)


def _rows(x_bsnh: Tensor, run: Run, num_kv_heads: int) -> Tensor:
    """Return the rows of a run's blocks, [c, m, r, h]. Query heads that share keys are below each other."""
    x = x_bsnh[run.samples, run.queries]
    b, _, n, h = x.shape
    x = x.reshape(b * run.count, run.num_queries, num_kv_heads, n // num_kv_heads, h)
    return x.permute(0, 2, 3, 1, 4).flatten(2, 3)


def _store(x_bsnh: Tensor, run: Run, part_cmrh: Tensor) -> None:
    """Store the rows of a run's blocks."""
    target = x_bsnh[run.samples, run.queries]
    b, _, n, h = target.shape
    c, m = part_cmrh.shape[:2]
    part = part_cmrh.reshape(c, m, n // m, run.num_queries, h).permute(0, 3, 1, 2, 4)
    target.copy_(part.reshape(b, run.count * run.num_queries, n, h))


def _keys(x_btmh: Tensor, run: Run, groups: int) -> Tensor:
    """Return the keys or values of a run's blocks, [c, m, t, h]: overlapping views, or copies for several `groups`."""
    x = x_btmh[run.samples, run.keys]
    if run.count == 1:
        x_bmth = x.transpose(1, 2)
        return x_bmth if groups == 1 else x_bmth.repeat_interleave(groups, 1)
    return x.unfold(1, run.num_keys, run.num_queries).flatten(0, 1).transpose(2, 3)


def _add(x_btmh: Tensor, run: Run, part_cmth: Tensor) -> None:
    """Add gradients of a run's keys or values."""
    if run.count == 1:
        x_btmh[run.samples, run.keys] += part_cmth.transpose(1, 2)
        return
    x_tmh = x_btmh[run.samples, run.keys].squeeze(0)
    for i, part_mth in enumerate(part_cmth):
        start = i * run.num_queries
        x_tmh[start : start + run.num_keys] += part_mth.transpose(0, 1)


@block_attention.register_fake
def _fake_forward(q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, positions: Tensor, scale: float) -> Any:
    return _empty_results(q)


@block_attention_backward.register_fake
def _fake_backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: object
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


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


Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]

MAX_DENSE_PAIRS = 1 << 19
"""Up to this many pairs in a batch, one call with a dense mask beats a call per block."""
NARROW_KEYS = 512
"""Mean of visible keys up to which narrow blocks of queries waste less than the kernel loses on them."""
NARROW_ROWS, WIDE_ROWS = 64, 256
"""Queries of a block; from 192 rows on, the kernel's own blocks are twice as high."""
MIN_CAUSAL = 256
"""Queries from which a causal document is a block of its own: the kernel skips hidden keys faster than a mask tells."""


@dataclass(frozen=True, eq=False)
class Pattern:
    """Visible pairs of a block, where some are hidden."""

    bias: Tensor
    """Terms of the scores, [b or 1, 1, r, t]: 0 or -inf."""
    hidden: Tensor | None
    """True for rows without visible keys, [b or 1, 1, r]; None if there are none."""


@dataclass(frozen=True, eq=False)
class Run:
    """Consecutive blocks of queries, each with the range of keys that covers all they see, in some samples.

    Block i has `num_queries` queries from `first_query + i · num_queries` and `num_keys` keys from `first_key + i ·
    num_queries`.
    """

    samples: slice
    first_query: int
    num_queries: int
    first_key: int
    num_keys: int
    pattern: Pattern | None
    """Visible pairs of each block; None if all are."""
    count: int = 1
    is_causal: bool = False
    """Whether query i of the single block sees its keys 0 to i; it has no pattern then."""

    @property
    def bias(self) -> Tensor | None:
        """Terms of the scores; None for zeros."""
        return None if self.pattern is None else self.pattern.bias

    @property
    def queries(self) -> slice:
        """All queries."""
        return slice(self.first_query, self.first_query + self.count * self.num_queries)

    @property
    def keys(self) -> slice:
        """All keys."""
        return slice(self.first_key, self.first_key + (self.count - 1) * self.num_queries + self.num_keys)

    def next_keys(self) -> slice:
        """Return the keys of a block that would continue the run."""
        start = self.first_key + self.count * self.num_queries
        return slice(start, start + self.num_keys)


@dataclass(frozen=True)
class BlockFinder:
    """Search for the blocks of a mask that are not empty."""

    groups: int
    """Query heads of a key/value head."""
    dtype: torch.dtype
    """Dtype of the scores."""

    def find(self, first_bs: Tensor, last_bs: Tensor, positions_bt: Tensor, batch: int) -> Iterator[Run]:
        """Yield all blocks of a batch, by the fields of `KeyBounds`, for all samples or for each."""
        first, last, positions = first_bs.numpy(), last_bs.numpy(), positions_bt.numpy()
        num_queries, num_keys = first.shape[1], positions.shape[1]
        if batch * num_queries * num_keys <= MAX_DENSE_PAIRS:
            pattern = self._pattern(_visible(first, last, positions))
            yield Run(slice(None), 0, num_queries, 0, num_keys, pattern)
            return
        shared = list(self._runs(first[0], last[0], positions[0])) if len(first) == 1 else None
        for i in range(batch):
            for run in self._runs(first[i], last[i], positions[i]) if shared is None else shared:
                yield replace(run, samples=slice(i, i + 1))

    def _runs(self, first: Ints, last: Ints, positions: Ints) -> Iterator[Run]:
        """Yield the runs of a sample."""
        num_rows = NARROW_ROWS if (last - first).mean() <= NARROW_KEYS else WIDE_ROWS
        in_order = bool((np.diff(positions) == 1).all())
        begin = 0
        for causal in _causal_runs(first, last, positions) if in_order else ():
            yield from self._blocks(first, last, positions, range(begin, causal.first_query, num_rows), in_order)
            yield causal
            begin = causal.queries.stop
        yield from self._blocks(first, last, positions, range(begin, len(first), num_rows), in_order)

    def _blocks(self, first: Ints, last: Ints, positions: Ints, starts: range, in_order: bool) -> Iterator[Run]:
        """Yield the runs of consecutive queries; `starts` are those of the blocks."""
        run, ends = None, np.empty(0, np.int32)
        for start in starts:
            rows = slice(start, min(start + starts.step, starts.stop))
            keys = _needed(positions, first[rows].min(), last[rows].max(), in_order)
            before, ends = ends, np.concatenate((first[rows], last[rows])) - start
            if run is not None and keys == run.next_keys() and in_order and np.array_equal(ends, before):
                run = replace(run, count=run.count + 1)
                continue
            if run is not None:
                yield run
            run = None
            if keys is not None:
                pattern = self._pattern(_visible(first[None, rows], last[None, rows], positions[None, keys]))
                run = Run(slice(None), start, rows.stop - start, keys.start, keys.stop - keys.start, pattern)
        if run is not None:
            yield run

    def _pattern(self, visible: Bools) -> Pattern | None:
        if visible.all():
            return None
        seen = visible.any(-1)
        hidden = None if seen.all() else torch.from_numpy(~seen)[:, None].repeat(1, 1, self.groups)
        masked = torch.from_numpy(~visible)[:, None].repeat(1, 1, self.groups, 1)
        return Pattern(torch.zeros(masked.shape, dtype=self.dtype).masked_fill_(masked, -math.inf), hidden)


def _causal_runs(first: Ints, last: Ints, positions: Ints) -> Iterator[Run]:
    """Yield the long stretches of queries of which each sees one key more than the one before, the first sees one."""
    breaks = np.flatnonzero((np.diff(first) != 0) | (np.diff(last) != 1)) + 1
    for start, stop in pairwise([0, *breaks.tolist(), len(first)]):
        key = int(first[start]) - int(positions[0])
        size = stop - start
        if size >= MIN_CAUSAL and last[start] == first[start] + 1 and 0 <= key <= len(positions) - size:
            yield Run(slice(None), start, size, key, size, None, is_causal=True)


def _needed(positions: Ints, first: int, last: int, in_order: bool) -> slice | None:
    """Return the range of keys that covers the positions from `first` to before `last`; None if there are none."""
    if in_order:
        offset = int(positions[0])
        start, stop = max(0, int(first) - offset), min(len(positions), int(last) - offset)
        return slice(start, stop) if start < stop else None
    needed = np.flatnonzero((positions >= first) & (positions < last))
    return slice(int(needed[0]), int(needed[-1]) + 1) if needed.size else None


def _visible(first: Ints, last: Ints, positions: Ints) -> Bools:
    positions = positions[:, None]
    visible: Bools = (first[..., None] <= positions) & (positions < last[..., None])
    return visible
