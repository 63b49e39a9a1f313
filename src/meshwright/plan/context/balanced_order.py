"""Tokens of each context-parallel rank: equally many, with equally many pairs of a query and a visible key."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.errors import ConfigError
from meshwright.nn.attention.mask_spec import Interval, MaskSpec
from meshwright.nn.attention.token_layout import Shard
from meshwright.plan.context.intervals import Intervals, union


def context_shards(masks: Sequence[MaskSpec], seq_len: int, num_ranks: int) -> tuple[Shard, ...]:
    """Distribute the tokens of each sample over context-parallel ranks.

    Args:
        masks: the masks of the model's layers, each as often as there are layers with it.
        seq_len: tokens of a sample.
        num_ranks: number of context-parallel ranks.

    Returns:
        The tokens of each rank.

    Raises:
        ConfigError: the ranks don't divide the sample.
    """
    if seq_len % num_ranks:
        fix = "make the sequence length a multiple of mesh.cp"
        raise ConfigError(
            f"mesh.cp = {num_ranks} does not divide {seq_len} tokens", rule="ranks hold equally many tokens", fix=fix
        )
    return tuple((one,) for one in zigzag(seq_len, num_ranks))


def contiguous(seq_len: int, num_ranks: int) -> tuple[Intervals, ...]:
    """Give each rank consecutive tokens."""
    size = seq_len // num_ranks
    return tuple(((rank * size, (rank + 1) * size),) for rank in range(num_ranks))


def zigzag(seq_len: int, num_ranks: int) -> tuple[Intervals, ...]:
    """Give each rank a chunk from the start and its mirror image from the end, which balances causal masks."""
    size = seq_len // num_ranks

    def chunk(index: int) -> Interval:
        return index * size // 2, (index + 1) * size // 2

    return tuple(union((chunk(rank), chunk(2 * num_ranks - 1 - rank))) for rank in range(num_ranks))
