"""Keys and values that context-parallel ranks need from each other under a mask, exact to the token.

A rank needs the keys that any of its queries may attend to. It needs each of them once, so these tokens are also the
fewest that any method can send that moves keys and values to their queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from meshwright.nn.attention.mask_spec import MaskSpec
from meshwright.nn.attention.token_layout import Shard
from meshwright.plan.context.intervals import count, intersection
from meshwright.plan.context.sample_mask import SampleMask


@dataclass(frozen=True)
class Exchange:
    """Tokens whose keys and values each rank needs and another rank holds."""

    tokens: tuple[tuple[Shard, ...], ...]
    """By receiver and sender: the intervals of each sample, in ascending order; a single entry if they are the same
    for all samples. Nothing is sent from a rank to itself."""

    @property
    def num_ranks(self) -> int:
        """Number of context-parallel ranks."""
        return len(self.tokens)

    @property
    def num_entries(self) -> int:
        """Number of samples, or 1 if all are the same."""
        return len(self.tokens[0][0])

    def num_tokens(self, receiver: int, sender: int) -> int:
        """Return the number of tokens that one rank needs from another, in all entries."""
        return sum(map(count, self.tokens[receiver][sender]))

    def num_received(self, rank: int) -> int:
        """Return the number of tokens that a rank needs from all others, in all entries."""
        return sum(self.num_tokens(rank, sender) for sender in range(self.num_ranks))

    def num_sent(self, rank: int) -> int:
        """Return the number of tokens that all others need from a rank, in all entries: once for each that needs it."""
        return sum(self.num_tokens(receiver, rank) for receiver in range(self.num_ranks))

    def total(self) -> int:
        """Return the number of tokens that all ranks need, in all entries."""
        return sum(map(self.num_received, range(self.num_ranks)))

    def at_distance(self, rank: int, distance: int) -> Shard:
        """Return the tokens that a rank receives in the ring from the rank that many places before it."""
        return self.tokens[rank][(rank - distance) % self.num_ranks]

    def distances(self) -> tuple[int, ...]:
        """Return the distances in the ring, in ascending order, at which any rank receives anything."""
        return tuple(
            distance
            for distance in range(1, self.num_ranks)
            if any(any(self.at_distance(rank, distance)) for rank in range(self.num_ranks))
        )


@lru_cache(maxsize=16)
def make_exchange(mask: MaskSpec, shards: tuple[Shard, ...], seq_len: int) -> Exchange:
    """Compute what each rank must receive.

    Args:
        mask: the mask of a layer.
        shards: tokens of each context-parallel rank, in ascending order.
        seq_len: tokens of a full sample.
    """
    num_entries = max(len(shards[0]), 1 if mask.documents is None else len(mask.documents))
    needed = []
    for sample in range(num_entries):
        held = [shard[min(sample, len(shard) - 1)] for shard in shards]
        index = SampleMask.make(mask, seq_len, sample)
        keys = [index.keys(queries) for queries in held]
        needed.append(
            [
                [intersection(wanted, given) if receiver != sender else () for sender, given in enumerate(held)]
                for receiver, wanted in enumerate(keys)
            ]
        )
    ranks = range(len(shards))
    return Exchange(tuple(tuple(tuple(one[to][by] for one in needed) for by in ranks) for to in ranks))
