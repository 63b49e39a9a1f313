"""Tokens of each context-parallel rank: equally many, with equal attention work under the masks of all layers.

Three orders are tried for each sample: contiguous, zigzag (Llama 3 herd, section 3.3.2), and arcs of equal work. Of
those whose slowest rank has at most 5 % more work than the mean, the one with the fewest received keys is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from meshwright.errors import ConfigError
from meshwright.nn.attention.mask_spec import Interval, MaskSpec
from meshwright.nn.attention.token_layout import Shard
from meshwright.plan.context.balanced_arcs import balanced_arcs
from meshwright.plan.context.intervals import Intervals, union
from meshwright.plan.context.layer_costs import LayerCosts

MAX_IMBALANCE = 1.05
"""Work of the slowest rank relative to the mean, up to which orders are compared by what they send."""
TOLERANCE = 0.04
"""Imbalance to which arcs are searched; the rest is for rounding to tokens."""
SIMPLICITY = 0.05
"""Fraction of the received keys that an order must save over a simpler one to be preferred."""


def context_shards(masks: Sequence[MaskSpec], seq_len: int, num_ranks: int) -> tuple[Shard, ...]:
    """Distribute the tokens of each sample over context-parallel ranks.

    Each sample is balanced by itself. If no order is within 5 %, which happens to ranks of a few tokens, the best
    balanced one is returned.

    Args:
        masks: the masks of the model's layers, one for each; those with documents have the same.
        seq_len: tokens of a sample.
        num_ranks: number of context-parallel ranks.

    Returns:
        The tokens of each rank in ascending order: an entry for each sample if there are documents, or a single one.

    Raises:
        ConfigError: the ranks don't divide the sample.
    """
    if seq_len % num_ranks:
        what, rule = f"cp = {num_ranks} does not divide {seq_len} tokens", "all ranks hold equally many tokens"
        raise ConfigError(what, where="mesh.cp", rule=rule, fix=f"use {seq_len - seq_len % num_ranks} tokens")
    samples = max((len(mask.documents) for mask in masks if mask.documents is not None), default=1)
    orders = [
        _order(tuple(_of_sample(mask, sample) for mask in masks), seq_len, num_ranks) for sample in range(samples)
    ]
    return tuple(zip(*orders, strict=True))


def imbalance(masks: Sequence[MaskSpec], shards: Sequence[Shard], seq_len: int, sample: int = 0) -> float:
    """Return the attention work of the slowest rank on a sample, relative to the mean over ranks."""
    costs = LayerCosts(masks, seq_len, sample)
    return _imbalance(costs, tuple(shard[min(sample, len(shard) - 1)] for shard in shards))


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


def _of_sample(mask: MaskSpec, sample: int) -> MaskSpec:
    return mask if mask.documents is None else replace(mask, documents=(mask.documents[sample],))


@lru_cache(maxsize=256)
def _order(masks: tuple[MaskSpec, ...], seq_len: int, num_ranks: int) -> tuple[Intervals, ...]:
    """Choose the order of one sample."""
    costs = LayerCosts(masks, seq_len)
    orders = [contiguous(seq_len, num_ranks), zigzag(seq_len, num_ranks)]
    orders.append(balanced_arcs(costs, num_ranks, tolerance=TOLERANCE))
    balanced = [
        (sum(map(costs.num_received, order)) * (1 + SIMPLICITY * index), index)
        for index, order in enumerate(orders)
        if _imbalance(costs, order) <= MAX_IMBALANCE
    ]
    return orders[min(balanced)[1]] if balanced else min(orders, key=lambda order: _imbalance(costs, order))


def _imbalance(costs: LayerCosts, order: tuple[Intervals, ...]) -> float:
    return max(map(costs.pairs_of, order)) * len(order) / costs.num_pairs
