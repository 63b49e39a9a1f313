"""Rank and place of each token of a micro-batch under context parallelism.

Shapes: b samples, or 1 if all are alike; t tokens of a sample; s tokens on a rank; R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshwright.nn.attention.mask_spec import Shard, TokenLayout
from meshwright.nn.attention.positions import document_starts, shard_indices


@dataclass(frozen=True, eq=False)
class TokenTable:
    """Tokens of the ranks that share a micro-batch's samples."""

    tokens_Rbs: Tensor
    """Tokens that each rank holds, in order."""
    rank_bt: Tensor
    """Rank that holds each token."""
    place_bt: Tensor
    """Place of each token among those of its rank."""
    starts_bt: Tensor
    """First token of each token's document."""

    @staticmethod
    def make(layout: TokenLayout, shards: tuple[Shard, ...]) -> TokenTable:
        """Create the table of a micro-batch's layout of full samples."""
        tokens = torch.stack([_rows(shard_indices(shard)) for shard in shards])
        num_ranks, num_samples, size = tokens.shape
        flat_bt = tokens.transpose(0, 1).flatten(1)
        order_bt = flat_bt.argsort(-1)
        starts = _rows(document_starts(layout)).expand(num_samples, -1)
        return TokenTable(tokens, order_bt // size, order_bt % size, starts)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.tokens_Rbs.shape[0]

    def own_bt(self) -> Tensor:
        """Return each token's own index."""
        return torch.arange(self.rank_bt.shape[1]).expand_as(self.rank_bt)

    def contiguous_bt(self) -> Tensor:
        """Return the index that each token would have if ranks held consecutive tokens."""
        return self.rank_bt * self.tokens_Rbs.shape[2] + self.place_bt

    def of_rank_bt(self, other: Tensor | int) -> Tensor:
        """Return the token at the same place of another rank, for each token."""
        rank_bt = torch.as_tensor(other).expand_as(self.rank_bt)
        return self.tokens_Rbs[rank_bt, torch.arange(len(rank_bt))[:, None], self.place_bt]

    def at_place_bt(self, order: Tensor) -> Tensor:
        """Return the token that its rank holds at the place order[place], for each token; `order` is [s]."""
        return replace(self, place_bt=order[self.place_bt]).of_rank_bt(self.rank_bt)

    def is_shared_bqk(self) -> Tensor:
        """Return whether each pair of tokens is on the same rank."""
        return self.rank_bt[:, :, None] == self.rank_bt[:, None, :]

    def is_same_document_bqk(self) -> Tensor:
        """Return whether each pair of tokens is in the same document."""
        return self.starts_bt[:, :, None] == self.starts_bt[:, None, :]


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x[None]
