"""Geometry of a layout's figure: a rectangle of boxes, each in the color of the rank that holds it.

Replicated and partial axes give several full tensors, drawn as sheets stacked behind each other. For tensors with more
than two dims, only sharded dims are shown: the first one vertically, the others nested horizontally.
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
from meshwright.reshard.verify.exchange_counts import edges_of, held_segments, rank_groups

Places = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Sheet:
    """Boxes of one full tensor.

    Attributes:
        rows: vertical edges of the boxes, from 0 to 1.
        columns: horizontal edges of the boxes, from 0 to 1.
        ranks: the rank that holds each box, of shape (rows, columns).
    """

    rows: Places
    columns: Places
    ranks: Ints


@dataclass(frozen=True)
class Dims:
    """Tensor dims that a figure shows vertically and horizontally."""

    down: tuple[int, ...]
    right: tuple[int, ...]


def shown_dims(layouts: Sequence[Layout]) -> Dims:
    """Choose the dims to show for all layouts of a plan."""
    num_dims = len(layouts[0].shape)
    if num_dims <= 2:
        return Dims(tuple(range(num_dims - 1)), tuple(range(num_dims))[-1:])
    sharded_dims = [dim for dim in range(num_dims) if any(layout.splits[dim] for layout in layouts)]
    return Dims(tuple(sharded_dims[:1]), tuple(sharded_dims[1:]))


def sheets(layout: Layout, dims: Dims) -> list[Sheet]:
    """Return one sheet per replica or partial value, by ascending coordinates; none for an empty tensor."""
    edges = [edges_of([layout], dim) for dim in range(len(layout.shape))]
    if 0 in layout.shape:
        return []
    held = [held_segments(layout, dim, dim_edges) for dim, dim_edges in enumerate(edges)]
    order = (*dims.down, *dims.right)
    extents = [len(edges[dim]) - 1 for dim in order]
    num_rows = math.prod(extents[: len(dims.down)])
    rows = _nest_edges([edges[dim] for dim in dims.down])
    columns = _nest_edges([edges[dim] for dim in dims.right])
    all_sheets = []
    for ranks in rank_groups(layout, tuple(sorted(layout.sharded_axes()))):
        owner = np.zeros(extents, np.int64)
        for rank in ranks:
            owner[np.ix_(*(np.flatnonzero(held[dim][rank]) for dim in order))] = rank
        all_sheets.append(Sheet(rows, columns, owner.reshape(num_rows, -1)))
    return all_sheets


def _nest_edges(edges: Sequence[Ints]) -> Places:
    """Scale the first dim's edges to [0, 1] and recursively nest the next dim's edges in each of its segments."""
    scale = np.array([0.0, 1.0])
    for dim_edges in reversed(edges):
        outer = dim_edges / dim_edges[-1]
        inner = outer[:-1, None] + np.diff(outer)[:, None] * scale[None, :-1]
        scale = np.append(inner.ravel(), 1.0)
    return scale


def downsample(sheet: Sheet, most: int) -> Sheet:
    """Downsample a sheet to at most `most` rows and columns by picking evenly spaced boxes."""

    def pick(edges: Places) -> Ints:
        return np.searchsorted(edges, (np.arange(most) + 0.5) / most, "right") - 1

    even = np.linspace(0, 1, most + 1)
    rows, columns = len(sheet.rows) - 1 > most, len(sheet.columns) - 1 > most
    ranks = sheet.ranks[pick(sheet.rows)] if rows else sheet.ranks
    ranks = ranks[:, pick(sheet.columns)] if columns else ranks
    return Sheet(even if rows else sheet.rows, even if columns else sheet.columns, ranks)


def rank_labels(ranks: Sequence[int]) -> list[str]:
    """Return labels for the ranks that hold a box, longest first."""
    first, last = str(ranks[0]), str(ranks[-1])
    if len(ranks) == 1:
        return [first]
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return [f"{first}–{last}", f"{first}…"]
    full = [" ".join(map(str, ranks))] if len(ranks) <= 4 else []
    return [*full, f"{first} … {last}", f"{first}…"]


def rank_colors(axis_sizes: Sequence[int]) -> NDArray[np.float64]:
    """Return a color per rank: the last axis varies the shade, the others the hue; a single axis varies the hue."""
    sizes = [size for size in axis_sizes if size > 1] or [1]
    num_shades = sizes[-1] if len(sizes) > 1 else 1
    num_hues = math.prod(sizes) // num_shades
    colors = []
    for hue, shade in product(range(num_hues), range(num_shades)):
        light = 0.70 if num_shades == 1 else 0.52 + 0.35 * shade / (num_shades - 1)
        colors.append(_from_oklch(light, 0.135 - 0.10 * max(0.0, light - 0.66), 250 + 360 * hue / num_hues))
    return np.array(colors)


def _from_oklch(light: float, chroma: float, hue: float) -> tuple[float, float, float]:
    """Convert a color from OKLCH (Ottosson, 2020) to sRGB, clipped to the displayable range."""
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
