"""Format ranks, regions, numbers and lists for findings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from meshwright.mesh.axes import Axes
from meshwright.prove.compare.tensor_shards import coordinates
from meshwright.units import counted, join_words

MAX_LISTED = 8
EVERYWHERE = "on every rank"


def rank_words(ranks: Iterable[int]) -> str:
    """Format ranks: `rank 3`, `ranks 0 and 2`, `64 ranks (0, 1, 2, … 63)`."""
    found = sorted(set(ranks))
    if len(found) == 1:
        return f"rank {found[0]}"
    if len(found) <= MAX_LISTED:
        return "ranks " + join_words([str(rank) for rank in found])
    return f"{counted(len(found), 'rank')} ({found[0]}, {found[1]}, {found[2]}, … {found[-1]})"


def index_words(indices: Sequence[int]) -> str:
    """Format indices: `4…7`, `3`, `0, 5, 2`; long lists are truncated."""
    values = list(indices)
    if len(values) > 2 and values == list(range(values[0], values[0] + len(values))):
        return f"{values[0]}…{values[-1]}"
    listed = ", ".join(str(value) for value in values[:MAX_LISTED])
    return f"{listed}, … ({len(values)})" if len(values) > MAX_LISTED else listed or "none"


def coordinate_words(coordinate: dict[str, int]) -> str:
    """Format a mesh coordinate: `dp_replicate = 1, tp = 0`."""
    return ", ".join(f"{axis} = {position}" for axis, position in coordinate.items())


def scope_words(wrong: Iterable[int], holders: Iterable[int], axes: Axes) -> str:
    """Format the wrong ranks among `holders`: `on every rank`, `only on rank 3`, `only on ranks 1 and 3 (tp = 1)`."""
    some, every, at_rank = set(wrong), set(holders), coordinates(axes)
    if some >= every:
        return EVERYWHERE
    for axis in axes.used():
        positions = {at_rank[rank][axis] for rank in some}
        if len(positions) == 1:
            at = positions.pop()
            if some == {rank for rank in every if at_rank[rank][axis] == at} and len(some) > 1:
                return f"only on {rank_words(some)} ({axis} = {at})"
    return f"only on {rank_words(some)}"


def number_words(value: float) -> str:
    """Format a factor with enough digits to distinguish it from 1: `2.000`, `0.00391`, `1 + 3.0e-10`."""
    if value == 1.0 or not np.isfinite(value):
        return f"{value:.3f}"
    if abs(value - 1.0) < 5e-3:
        return f"1 {'+' if value > 1 else '−'} {abs(value - 1.0):.1e}"
    text = f"{value:.3f}" if 0.05 <= abs(value) < 1e4 else f"{value:.3g}"
    return text.replace("-", "−") if text.startswith("-") else text


def box_words(mask: np.ndarray[Any, np.dtype[np.bool_]]) -> str:
    """Format the bounding box of the true elements: `element [3, 4]`, `dim 0: 2…3`, `everywhere`."""
    if mask.ndim == 0:
        return "everywhere"
    at = np.argwhere(mask)
    low, high = at.min(axis=0), at.max(axis=0)
    if len(at) == 1:
        return f"element {[int(i) for i in low]}"
    spans = [
        f"dim {dim}: {a}…{b}" if a != b else f"dim {dim}: {a}"
        for dim, (a, b, size) in enumerate(zip(low, high, mask.shape, strict=True))
        if b - a + 1 < size
    ]
    return ", ".join(spans) or "everywhere"
