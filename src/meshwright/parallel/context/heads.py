"""Context parallelism by heads: all-to-alls turn shards of tokens into shards of heads and back (Jacobs et al. 2023,
"DeepSpeed-Ulysses").

Shapes: b batch, s tokens on this rank, t tokens of a full sample, n heads, h head_dim, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshwright.comm.alltoallv import all_to_all
from meshwright.comm.collectives import world_size
from meshwright.nn.attention.attention import attention
from meshwright.nn.attention.attention_mask import AttentionMask
from meshwright.nn.attention.backend import AttentionRequest
from meshwright.nn.attention.core import AttentionCore
from meshwright.nn.attention.mask_spec import MaskSpec
from meshwright.nn.attention.token_indices import shard_indices
from meshwright.nn.attention.token_layout import TokenLayout


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

    def __call__(self, q_bsnh: Tensor, k_bsnh: Tensor, v_bsnh: Tensor, mask: HeadsMask) -> Tensor:
        """Return the output [b, s, n, h]."""
        num_ranks, num_samples = world_size(self.group), q_bsnh.shape[0]
        by_rank = [torch.unflatten(x, 2, (num_ranks, -1)) for x in (q_bsnh, k_bsnh, v_bsnh)]
        sizes = [x.shape[3] for x in by_rank]
        rows = self._exchange(torch.cat(by_rank, dim=3).permute(2, 0, 1, 3, 4))
        full_btmh = rows.transpose(0, 1).flatten(1, 2)
        q, k, v = torch.split(_reorder(full_btmh, mask.received_t), sizes, dim=2)
        out_btnh = _reorder(attention(q, k, v, mask=mask.mask), mask.token_t)
        out = self._exchange(torch.unflatten(out_btnh, 1, (num_ranks, -1)).transpose(0, 1))
        return out.permute(1, 2, 0, 3, 4).reshape(num_samples, q_bsnh.shape[1], *q_bsnh.shape[2:])

    def _exchange(self, x_Rbsnh: Tensor) -> Tensor:
        """Send each rank its part, and return the parts received, in order of ranks."""
        num_ranks, rows = x_Rbsnh.shape[0], x_Rbsnh.shape[1] * x_Rbsnh.shape[2]
        splits = [rows] * num_ranks
        out = all_to_all(x_Rbsnh.flatten(0, 2), send_splits=splits, recv_splits=splits, group=self.group)
        return out.view(x_Rbsnh.shape)


def _reorder(x_btnh: Tensor, index_t: Tensor) -> Tensor:
    if index_t.dim() == 1:
        return x_btnh.index_select(1, index_t)
    return x_btnh.take_along_dim(index_t[:, :, None, None], dim=1)
