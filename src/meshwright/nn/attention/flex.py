"""Attention by PyTorch's `flex_attention` (Dong et al. 2024, arXiv 2412.05496), compiled: empty blocks are skipped, and
only partial blocks evaluate the mask.

On CPU it has a forward only. Shapes: b samples, s queries, t keys, n heads, m key/value heads, h head_dim; i blocks of
queries, j blocks of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

BLOCK_SIZE = 128
"""Queries and keys of a block, flex_attention's default."""
MAX_COUNTS = 1 << 24
"""Counts of a sample's positions that are held at once while blocks are found."""

Bounds = tuple[Tensor, Tensor, Tensor]
"""Fields of `KeyBounds`."""


def flex_mask(bounds: Bounds, seq_len: int, device: torch.device) -> BlockMask:
    """Return the block mask of bounds on CPU, for samples of `seq_len` tokens."""
    first_bs, last_bs, positions_bt = bounds
    kinds = [_blocks(*one, seq_len) for one in zip(first_bs.long(), last_bs.long(), positions_bt.long(), strict=True)]
    visible_bij, full_bij = (torch.stack(blocks) for blocks in zip(*kinds, strict=True))
    partial, full = _ordered(visible_bij & ~full_bij, device), _ordered(full_bij, device)
    lengths, on_device = (first_bs.shape[1], positions_bt.shape[1]), [x.to(device) for x in bounds]
    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=BLOCK_SIZE, mask_mod=_mask_function(*on_device), seq_lengths=lengths
    )


def flex(
    q_bsnh: Tensor, k_btmh: Tensor, v_btmh: Tensor, mask: BlockMask, *, scale: float, soft_cap: float | None = None
) -> Tensor:
    """Return outputs [b, s, n, h]."""
    out_bnsh: Tensor = _run(q_bsnh, k_btmh, v_btmh, mask, scale, soft_cap, None)
    return out_bnsh.transpose(1, 2)


def flex_with_lse(
    q_bsnh: Tensor, k_btmh: Tensor, v_btmh: Tensor, mask: BlockMask, *, scale: float, soft_cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return outputs [b, s, n, h] and lse [b, n, s]."""
    out_bnsh, auxiliary = _run(q_bsnh, k_btmh, v_btmh, mask, scale, soft_cap, AuxRequest(lse=True))
    return out_bnsh.transpose(1, 2), auxiliary.lse


def _run(
    q_bsnh: Tensor, k_btmh: Tensor, v_btmh: Tensor, mask: BlockMask, scale: float, soft_cap: float | None, aux: Any
) -> Any:
    run: Any = flex_attention if torch.compiler.is_compiling() else _compiled(q_bsnh.device.type)
    return run(
        q_bsnh.transpose(1, 2), k_btmh.transpose(1, 2), v_btmh.transpose(1, 2), block_mask=mask, scale=scale,
        enable_gqa=q_bsnh.shape[2] != k_btmh.shape[2], return_aux=aux,
        score_mod=None if soft_cap is None else _capped(soft_cap),
    )  # fmt: skip


@cache
def _capped(cap: float) -> Callable[..., Tensor]:
    """Return the cap as a function of scores and their places: one function a cap, for which kernels are compiled."""

    def capped(score: Tensor, *place: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


@cache
def _compiled(device: str) -> Callable[..., Any]:
    """Return compiled flex_attention; called as it is, it would compute all scores.

    On CPU each shape is compiled for itself: for symbolic ones, PyTorch 2.13 may generate C++ with undeclared names.
    """
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False if device == "cpu" else None)
    return compiled


def _blocks(first_s: Tensor, last_s: Tensor, positions_t: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """Return the blocks [i, j] of a sample that are not empty, and those that are full.

    For each block of queries, the queries that see a position are counted without a dense mask: one more where an
    interval of keys starts, one less after its end. flex_attention masks what is outside the shapes in partial blocks
    only, so incomplete blocks are never full.
    """
    some, every = [], []
    per_chunk = max(1, MAX_COUNTS // (seq_len + 1)) * BLOCK_SIZE
    for first, last in zip(torch.split(first_s, per_chunk), torch.split(last_s, per_chunk), strict=True):
        row = torch.arange(len(first)) // BLOCK_SIZE
        counts_si = torch.zeros(seq_len + 1, int(row[-1]) + 1, dtype=torch.int32)
        one = torch.ones(len(first), dtype=torch.int32)
        counts_si.index_put_((first, row), one, accumulate=True).index_put_((last, row), -one, accumulate=True)
        seen_ti = counts_si.cumsum_(0).index_select(0, positions_t)
        padded_ti = F.pad(seen_ti, (0, 0, 0, -len(positions_t) % BLOCK_SIZE))
        seen_jti = torch.unflatten(padded_ti, 0, (-1, BLOCK_SIZE))
        some.append(seen_jti.amax(1).T > 0)
        every.append(seen_jti.amin(1).T == BLOCK_SIZE)
    return torch.cat(some), torch.cat(every)


def _ordered(blocks_bij: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return numbers and indices of the blocks of each row, [b, 1, i] and [b, 1, i, j]; indices past the number are of
    other blocks."""
    indices = blocks_bij.int().argsort(dim=-1, descending=True, stable=True)
    return tuple(x[:, None].int().to(device) for x in (blocks_bij.sum(-1), indices))  # type: ignore[return-value]


def _mask_function(
    first_bs: Tensor, last_bs: Tensor, positions_bt: Tensor
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the mask as a function of batch, head, query and key."""
    if first_bs.shape[0] == 1:
        first_s, last_s, positions_t = first_bs[0], last_bs[0], positions_bt[0]

        def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (first_s[query] <= positions_t[key]) & (positions_t[key] < last_s[query])

        return visible

    def visible_in_sample(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (first_bs[b, query] <= positions_bt[b, key]) & (positions_bt[b, key] < last_bs[b, query])

    return visible_in_sample
