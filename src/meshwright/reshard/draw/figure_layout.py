"""What a picture of a layout shows: the tensor as a rectangle of boxes, each in the colour of the rank that has it.

Axes that hold copies or partial values give several whole tensors, drawn as sheets one behind the other. Of tensors
with more than two dims those that are cut are shown: the first downwards, the others to the right, one in the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from meshwright.mesh.layout import Layout
from meshwright.mesh.shard_intervals import Ints
from meshwright.reshard.verify.exchange_counts import edges_of, groups, held

Places = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Sheet:
    """One whole tensor.

    Attributes:
        rows: where boxes begin and end downwards, from 0 to 1.
        columns: likewise, to the right.
        ranks: who has each box: shape (rows, columns).
    """

    rows: Places
    columns: Places
    ranks: Ints


@dataclass(frozen=True)
class Dims:
    """The tensor dims that a picture shows downwards and to the right."""

    down: tuple[int, ...]
    right: tuple[int, ...]


def shown_dims(layouts: Sequence[Layout]) -> Dims:
    """The same ones in all states of a plan."""
    num_dims = len(layouts[0].shape)
    if num_dims <= 2:
        return Dims(tuple(range(num_dims - 1)), tuple(range(num_dims))[-1:])
    cut = [dim for dim in range(num_dims) if any(layout.splits[dim] for layout in layouts)]
    return Dims(tuple(cut[:1]), tuple(cut[1:]))


def sheets(layout: Layout, dims: Dims) -> list[Sheet]:
    """The whole tensors that the mesh holds, by ascending coordinates on the axes that cut nothing; none of an empty
    tensor."""
    edges = [edges_of([layout], dim) for dim in range(len(layout.shape))]
    if 0 in layout.shape:
        return []
    has = [held(layout, dim, cuts) for dim, cuts in enumerate(edges)]
    order = (*dims.down, *dims.right)
    extents = [len(edges[dim]) - 1 for dim in order]
    num_rows = math.prod(extents[: len(dims.down)])
    rows = _nested([edges[dim] for dim in dims.down])
    columns = _nested([edges[dim] for dim in dims.right])
    found = []
    for ranks in groups(layout, tuple(sorted(layout.sharded_axes()))):
        owner = np.zeros(extents, np.int64)
        for rank in ranks:
            owner[np.ix_(*(np.flatnonzero(has[dim][rank]) for dim in order))] = rank
        found.append(Sheet(rows, columns, owner.reshape(num_rows, -1)))
    return found


def _nested(edges: Sequence[Ints]) -> Places:
    """Edges of the first dim on a scale from 0 to 1, between neighbours those of the next dim, and so on."""
    scale = np.array([0.0, 1.0])
    for cuts in reversed(edges):
        outer = cuts / cuts[-1]
        inner = outer[:-1, None] + np.diff(outer)[:, None] * scale[None, :-1]
        scale = np.append(inner.ravel(), 1.0)
    return scale


def sampled(sheet: Sheet, most: int) -> Sheet:
    """The sheet with at most so many boxes downwards and to the right, those that lie at equal distances."""

    def pick(edges: Places) -> Ints:
        return np.searchsorted(edges, (np.arange(most) + 0.5) / most, "right") - 1

    even = np.linspace(0, 1, most + 1)
    rows, columns = len(sheet.rows) - 1 > most, len(sheet.columns) - 1 > most
    ranks = sheet.ranks[pick(sheet.rows)] if rows else sheet.ranks
    ranks = ranks[:, pick(sheet.columns)] if columns else ranks
    return Sheet(even if rows else sheet.rows, even if columns else sheet.columns, ranks)


def names_of_ranks(ranks: Sequence[int]) -> list[str]:
    """Ways to write who has a box, from the fullest to the shortest."""
    first, last = str(ranks[0]), str(ranks[-1])
    if len(ranks) == 1:
        return [first]
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return [f"{first}–{last}", f"{first}…"]
    full = [" ".join(map(str, ranks))] if len(ranks) <= 4 else []
    return [*full, f"{first} … {last}", f"{first}…"]


def rank_colors(axis_sizes: Sequence[int]) -> NDArray[np.float64]:
    """A colour for each rank: shades by the last axis, hues by the others; by the one axis of a mesh that has one."""
    sizes = [size for size in axis_sizes if size > 1] or [1]
    num_shades = sizes[-1] if len(sizes) > 1 else 1
    num_hues = math.prod(sizes) // num_shades
    colors = []
    for hue, shade in product(range(num_hues), range(num_shades)):
        light = 0.70 if num_shades == 1 else 0.52 + 0.35 * shade / (num_shades - 1)
        colors.append(_from_oklch(light, 0.135 - 0.10 * max(0.0, light - 0.66), 250 + 360 * hue / num_hues))
    return np.array(colors)


def _from_oklch(light: float, chroma: float, hue: float) -> tuple[float, float, float]:
    """sRGB of a colour in Ottosson's OKLCH (2020), where equal steps look equal; clipped to what a screen has."""
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    long = (light + 0.3963377774 * a + 0.2158037573 * b) ** 3
    middle = (light - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (light - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * middle + 1.7076147010 * short,
    )
    red, green, blue = (
        min(1.0, max(0.0, 12.92 * x if x <= 0.0031308 else 1.055 * x ** (1 / 2.4) - 0.055)) for x in linear
    )
    return red, green, blue
