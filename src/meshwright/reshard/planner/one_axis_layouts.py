"""Intermediate layouts for plans with one mesh axis per exchange, for meshes without groups over several axes.

One path always exists: reduce partial values axis by axis, last axis first; gather the axes that the goal does not
shard, innermost first in each dim; then slice. PyTorch's planner takes this path. The other forms gather less to save
bytes where possible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

from meshwright.mesh.layout import Layout
from meshwright.reshard.planner.intermediate_layouts import mixed_layouts

MAX_AXES = 4
"""Maximum number of axes for which all mixtures of `src` and the goal are tried."""


def one_axis_path(src: Layout, goal: Layout) -> list[Layout]:
    """Return a sequence of one-axis steps from `src` to a layout that can be sliced into `goal`."""
    path = _reduced(src, goal)
    current = path[-1] if path else src
    for dim, (dim_splits, goal_splits) in enumerate(zip(src.splits, goal.splits, strict=True)):
        differs = [a != b for a, b in zip(dim_splits, goal_splits, strict=False)]
        kept = differs.index(True) if True in differs else len(differs)
        for count in range(len(dim_splits) - 1, kept - 1, -1):
            current = replace(current, splits=(*current.splits[:dim], dim_splits[:count], *current.splits[dim + 1 :]))
            path.append(current)
    return path


def one_axis_forms(src: Layout, goal: Layout) -> list[Layout]:
    """Return the distinct candidate layouts for one-axis steps, in a fixed order."""
    path = one_axis_path(src, goal)
    reduced = (_reduced(src, goal) or [src])[-1]
    forms = [*path, *_gathered(reduced), *_gathered(goal)]
    axes = [axis for axis, size in enumerate(src.axis_sizes) if size > 1]
    counts = range(1, len(axes)) if len(axes) <= MAX_AXES else (1, len(axes) - 1)
    for count in counts:
        for moved in combinations(axes, count):
            forms += mixed_layouts(src, goal, frozenset(moved))
    return list(dict.fromkeys(forms))


def _reduced(src: Layout, goal: Layout) -> list[Layout]:
    """Return the layouts that reduce the partial axes of `src` one by one until only those of `goal` remain."""
    forms, current = [], src
    for axis in reversed(src.partial_axes()):
        if not goal.partial[axis]:
            current = current.with_partial([axis], None)
            forms.append(current)
    return forms


def _gathered(layout: Layout) -> Iterator[Layout]:
    """Yield the layout with each possible number of innermost axes gathered in each dim."""
    for counts in product(*(range(len(dim_splits), -1, -1) for dim_splits in layout.splits)):
        splits = tuple(dim_splits[:count] for dim_splits, count in zip(layout.splits, counts, strict=True))
        yield replace(layout, splits=splits)
