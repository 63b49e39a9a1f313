"""Placement of pipeline stages on ranks."""

from __future__ import annotations


def loop_placement(num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """Place stage s on rank s mod p."""
    return tuple(range(num_ranks)) * num_chunks


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """Place stages down the ranks and back up: the first rank has the first and the last stage."""
    return (*range(num_ranks), *reversed(range(num_ranks)))
