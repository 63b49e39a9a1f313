"""Layouts to pass through where every exchange is to go along one mesh axis, as on a mesh without groups of several.

One way is always open: partial values are reduced axis by axis, the last first; then the cuts that the goal does not
have are undone, in each dim the innermost first, each by a gather along its own axis; what is left is to slice. That is
what PyTorch's planner does. The other forms are less gathered ones, so that bytes are saved where it can be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

from meshwright.mesh.layout import Layout
from meshwright.reshard.planner.intermediate_layouts import mixed

MAX_AXES = 4
"""On meshes of more axes fewer mixtures of the two ends are tried."""


def one_axis_way(src: Layout, goal: Layout) -> list[Layout]:
    """From `src` to what is sliced into `goal`: layouts of which each follows from the one before along one axis."""
    way = _reduced(src, goal)
    now = way[-1] if way else src
    for dim, (cuts, wanted) in enumerate(zip(src.splits, goal.splits, strict=True)):
        same = next((at for at, pair in enumerate(zip(cuts, wanted, strict=False)) if pair[0] != pair[1]), None)
        kept = min(len(cuts), len(wanted)) if same is None else same
        for count in range(len(cuts) - 1, kept - 1, -1):
            now = replace(now, splits=(*now.splits[:dim], cuts[:count], *now.splits[dim + 1 :]))
            way.append(now)
    return way


def one_axis_forms(src: Layout, goal: Layout) -> list[Layout]:
    """Layouts of the way and beside it, in a fixed order, without repetitions."""
    way = one_axis_way(src, goal)
    reduced = (_reduced(src, goal) or [src])[-1]
    forms = [*way, *_gathered(reduced), *_gathered(goal)]
    axes = [axis for axis, size in enumerate(src.axis_sizes) if size > 1]
    counts = range(1, len(axes)) if len(axes) <= MAX_AXES else (1, len(axes) - 1)
    for count in counts:
        for moved in combinations(axes, count):
            forms += mixed(src, goal, frozenset(moved))
    return list(dict.fromkeys(forms))


def _reduced(src: Layout, goal: Layout) -> list[Layout]:
    """`src` with ever fewer partial axes, until it has those of `goal`."""
    forms, now = [], src
    for axis in reversed(src.partial_axes()):
        if not goal.partial[axis]:
            now = now.with_partial([axis], None)
            forms.append(now)
    return forms


def _gathered(layout: Layout) -> Iterator[Layout]:
    """The layout with any number of each dim's innermost cuts undone."""
    for counts in product(*(range(len(cuts), -1, -1) for cuts in layout.splits)):
        splits = tuple(cuts[:count] for cuts, count in zip(layout.splits, counts, strict=True))
        yield replace(layout, splits=splits)
