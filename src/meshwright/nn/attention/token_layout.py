"""Placement of a micro-batch's tokens: their documents, their samples, and which of them this rank holds. Doesn't
import torch.

It is a condition of every stage, so that each can compute masks, positions and random counters by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.nn.attention.mask_spec import Documents, Interval

Shard = tuple[tuple[Interval, ...], ...]
"""Tokens of a rank: the intervals of each sample, in the order in which the rank holds them; a single entry if they
are the same for all samples. All samples have the same number of tokens on a rank."""


@dataclass(frozen=True)
class TokenLayout:
    """Placement of the tokens of a micro-batch."""

    seq_len: int
    """Tokens of a full sample."""
    documents: Documents | None = None
    """Lengths of the documents of each sample; None if each sample is a single document."""
    samples: tuple[int, ...] | None = None
    """Numbers of the samples, counted from the start of the run over all ranks; needed for random numbers."""
    shards: tuple[Shard, ...] | None = None
    """Tokens of each context-parallel rank; None if the rank holds all tokens."""
    rank: int = 0
    """Context-parallel index of this rank."""
    stream: tuple[int, int] = (0, 1)
    """Index and number of the equal parts of this rank's tokens, of which it holds one between tensor-parallel
    regions."""

    def on(self, shards: tuple[Shard, ...], rank: int) -> TokenLayout:
        """Return the layout on a context-parallel rank."""
        return replace(self, shards=shards, rank=rank)

    @property
    def shard(self) -> Shard:
        """Tokens of this rank."""
        return (((0, self.seq_len),),) if self.shards is None else self.shards[self.rank]

    @property
    def num_tokens(self) -> int:
        """Tokens of a sample on this rank."""
        return sum(stop - start for start, stop in self.shard[0])
