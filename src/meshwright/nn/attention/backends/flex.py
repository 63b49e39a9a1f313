"""Attention by PyTorch's `flex_attention` (Dong et al. 2024, arXiv 2412.05496), compiled: empty blocks are skipped, and
only partial blocks evaluate the mask.

On CPU it has a forward only. Shapes: b samples, s queries, t keys, n heads, m key/value heads, h head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

from meshwright.nn.attention.block_mask import BlockMask, block_mask
from meshwright.nn.attention.key_bounds import KeyBounds
from meshwright.nn.attention.mask_spec import MaskSpec
from meshwright.nn.attention.token_layout import Shard

BLOCK_SIZE = 128
"""Queries and keys of a block, flex_attention's default."""


def flex_mask(spec: MaskSpec, seq_len: int, queries: Shard, keys: Shard, bounds: KeyBounds) -> FlexBlockMask:
    """Return the block mask of queries and keys; its tensors are on the device of the bounds."""
    num_samples, num_queries = bounds.first_bs.shape
    num_keys = bounds.positions_bt.shape[1]
    samples = [
        block_mask(spec, seq_len, BLOCK_SIZE, sample=sample, queries=queries[sample % len(queries)],
                   keys=keys[sample % len(keys)])
        for sample in range(num_samples)
    ]  # fmt: skip
    # flex_attention masks what is outside the shapes in partial blocks only, so incomplete blocks are never full.
    complete = num_queries // BLOCK_SIZE, num_keys // BLOCK_SIZE
    full, partial = [], []
    for sample in samples:
        rows = [_row(sample, row, complete) for row in range(len(sample.rows))]
        full.append([row[0] for row in rows])
        partial.append([row[1] for row in rows])
    device = bounds.first_bs.device
    return FlexBlockMask.from_kv_blocks(
        *_ordered(partial, samples[0].num_key_blocks, device), *_ordered(full, samples[0].num_key_blocks, device),
        BLOCK_SIZE=BLOCK_SIZE, mask_mod=_mask_function(bounds), seq_lengths=(num_queries, num_keys),
    )  # fmt: skip


def flex(q_bsnh: Tensor, k_btmh: Tensor, v_btmh: Tensor, mask: FlexBlockMask, *, scale: float) -> Tensor:
    """Return outputs [b, s, n, h]."""
    out_bnsh: Tensor = _run(q_bsnh, k_btmh, v_btmh, mask, scale, None)
    return out_bnsh.transpose(1, 2)


def flex_with_lse(
    q_bsnh: Tensor, k_btmh: Tensor, v_btmh: Tensor, mask: FlexBlockMask, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Return outputs [b, s, n, h] and lse [b, n, s]."""
    out_bnsh, auxiliary = _run(q_bsnh, k_btmh, v_btmh, mask, scale, AuxRequest(lse=True))
    return out_bnsh.transpose(1, 2), auxiliary.lse


def _run(q_bsnh: Tensor, k_btmh: Tensor, v_btmh: Tensor, mask: FlexBlockMask, scale: float, aux: Any) -> Any:
    run: Any = flex_attention if torch.compiler.is_compiling() else _compiled(q_bsnh.device.type)
    return run(
        q_bsnh.transpose(1, 2), k_btmh.transpose(1, 2), v_btmh.transpose(1, 2), block_mask=mask, scale=scale,
        enable_gqa=q_bsnh.shape[2] != k_btmh.shape[2], return_aux=aux,
    )  # fmt: skip


@cache
def _compiled(device: str) -> Callable[..., Any]:
    """Return compiled flex_attention; called as it is, it would compute all scores.

    On CPU each shape is compiled for itself: for symbolic ones, PyTorch 2.13 may generate C++ with undeclared names.
    """
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False if device == "cpu" else None)
    return compiled


def _row(mask: BlockMask, row: int, complete: tuple[int, int]) -> tuple[list[int], list[int]]:
    """Return the full and the partial blocks of a row."""
    blocks = mask.rows[row]
    full = [block for block in blocks.full_blocks() if row < complete[0] and block < complete[1]]
    rest = set(full)
    partial = [block for first, last in blocks.visible for block in range(first, last) if block not in rest]
    return full, partial


def _ordered(samples: list[list[list[int]]], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return numbers and indices of the blocks of each row, [b, 1, rows] and [b, 1, rows, width]."""
    counts = torch.tensor([[len(row) for row in rows] for rows in samples], dtype=torch.int32)
    indices = torch.tensor([[row + [0] * (width - len(row)) for row in rows] for rows in samples], dtype=torch.int32)
    return counts[:, None].to(device), indices[:, None].to(device)


def _mask_function(bounds: KeyBounds) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the mask as a function of batch, head, query and key."""
    first_bs, last_bs, positions_bt = bounds.first_bs, bounds.last_bs, bounds.positions_bt
    if first_bs.shape[0] == 1:
        first_s, last_s, positions_t = first_bs[0], last_bs[0], positions_bt[0]

        def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (first_s[query] <= positions_t[key]) & (positions_t[key] < last_s[query])

        return visible

    def visible_in_sample(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (first_bs[b, query] <= positions_bt[b, key]) & (positions_bt[b, key] < last_bs[b, query])

    return visible_in_sample
