"""Which rank each stage is on."""

from __future__ import annotations


def in_a_loop(num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """Stage s on rank s mod p: after the last rank comes the first again."""
    return tuple(range(num_ranks)) * num_chunks


def as_a_v(num_ranks: int) -> tuple[int, ...]:
    """Down the ranks and up again: the first rank has the first and the last stage."""
    return (*range(num_ranks), *reversed(range(num_ranks)))
