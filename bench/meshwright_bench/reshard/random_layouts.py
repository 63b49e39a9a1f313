"""Random pairs of layouts for tests and benchmarks of the planner."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

from meshwright.mesh.layout import Layout
from meshwright.mesh.shard_intervals import Reduction, Split

_EVEN = (4096, 8192, 16384)
_UNEVEN = (1, 7, 1000, 4097, 5003)


def sample_pairs(num_axes: int, seed: int, *, max_ranks: int = 1024) -> Iterator[tuple[Layout, Layout]]:
    """Yield an endless stream of layout pairs: any shard order, strided and uneven shards, replicas, partial values.

    Args:
        num_axes: number of mesh axes.
        seed: random seed; the same seed gives the same pairs.
        max_ranks: maximum number of ranks in a mesh.
    """
    rng = random.Random(f"{num_axes}/{seed}")
    while True:
        axis_sizes = _mesh(rng, num_axes, max_ranks)
        sizes = _EVEN if rng.random() < 0.7 else (*_EVEN, *_UNEVEN)
        shape = tuple(rng.choice(sizes) for _ in range(rng.choice((1, 2, 2, 3))))
        yield sample_layout(rng, axis_sizes, shape), sample_layout(rng, axis_sizes, shape)


def sample_layout(rng: random.Random, axis_sizes: Sequence[int], shape: Sequence[int]) -> Layout:
    """Sample a layout: about half of the axes shard a dim, the others are replicated or partial."""
    splits: list[list[Split]] = [[] for _ in shape]
    partial: list[Reduction | None] = [None] * len(axis_sizes)
    axes = list(range(len(axis_sizes)))
    if rng.random() < 0.5:
        rng.shuffle(axes)
    reduction = rng.choice((Reduction.SUM, Reduction.SUM, Reduction.SUM, *Reduction))
    for axis in axes:
        what = rng.choices(("cut", "copy", "partial"), (5, 3, 2 if rng.random() < 0.5 else 0))[0]
        if what == "cut":
            parts = rng.choice([size for size in axis_sizes if size > 1] or [1]) if rng.random() < 0.1 else 1
            rng.choice(splits).append(Split(axis, parts))
        elif what == "partial":
            partial[axis] = reduction if rng.random() < 0.8 else rng.choice(list(Reduction))
    return Layout(tuple(shape), tuple(axis_sizes), tuple(tuple(dim_splits) for dim_splits in splits), tuple(partial))


def _mesh(rng: random.Random, num_axes: int, max_ranks: int) -> tuple[int, ...]:
    while True:
        sizes = tuple(rng.choice((2, 2, 3, 4, 4, 6, 8, 8, 16)) for _ in range(num_axes))
        if math.prod(sizes) <= max_ranks:
            return sizes
