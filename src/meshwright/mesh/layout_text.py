"""Layouts written as words, one for each mesh axis: `S0 R P(max) SS1/4`.

An error's fix is a whole layout where it is evident which was meant (`layout_meant`): one that can be read. Else it
says what there is to choose from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from meshwright.errors import LayoutError
from meshwright.mesh.layout_suggest import meant
from meshwright.mesh.layout_validate import normal_order, whole_numbers
from meshwright.mesh.reduction import Reduction
from meshwright.mesh.shard_intervals import Split

_N = r"[0-9]{1,9}"
_WORD = re.compile(rf"S(?P<dim>-?{_N})(@(?P<place>{_N}))?|SS(?P<sdim>-?{_N})/(?P<parts>{_N})(@(?P<splace>{_N}))?")
_PARTIAL = re.compile(r"P(\((?P<reduction>\w*)\))?")
_EXAMPLE = "one of R, S0, SS0/4, P, P(max) for each mesh axis, as in 'S0 R'"
_MOST_NAMED = 4
"""Dims that an error names one by one."""


_Order = Mapping[int, Sequence[int]]
_Sizes = tuple[int, ...]
L = TypeVar("L")
"""A layout, which this file reads and `layout` defines."""
Make = Callable[[_Sizes, _Sizes, tuple[tuple[Split, ...], ...], tuple[Reduction | None, ...]], L]
"""From a shape, the mesh's sizes, the splits of each dim and the reduction of each axis to a layout."""


@dataclass(frozen=True)
class _Cut:
    dim: int
    split: Split
    place: int | None


def parse(text: Any, axis_sizes: Any, shape: Any, shard_order: Any, *, make: Make[L]) -> L:
    """See `Layout.parse`."""
    axis_sizes, shape = whole_numbers(axis_sizes, "axis_sizes"), whole_numbers(shape, "shape")
    _check_sizes(axis_sizes, shape)
    order = {} if shard_order is None else normal_order(shard_order, len(shape))
    try:
        return _read(text, axis_sizes, shape, order, make)
    except LayoutError as error:
        words = text if isinstance(text, str) else " ".join(map(str, text)) if isinstance(text, Sequence) else ""
        fixes = (fix for fix in meant(words, len(axis_sizes)) if _is_read(fix, axis_sizes, shape, order, make))
        fix = next(fixes, error.fix)
        raise LayoutError(error.what, where=error.where, rule=error.rule, fix=fix) from None


def _is_read(text: str, axis_sizes: _Sizes, shape: _Sizes, order: _Order, make: Make[Any]) -> bool:
    try:
        _read(text, axis_sizes, shape, order, make)
    except LayoutError:
        return False
    return True


def _read(text: Any, axis_sizes: _Sizes, shape: _Sizes, order: _Order, make: Make[L]) -> L:
    if not isinstance(text, str):
        raise LayoutError(
            f"{text!r} is a {type(text).__name__}, not a text",
            where="text",
            rule=f"a layout is written as {_EXAMPLE}",
            fix=f"a text of {len(axis_sizes)} words, each {_choice(shape)}",
        )
    words = text.replace(",", " ").split()
    if len(words) != len(axis_sizes):
        raise LayoutError(
            f"{text!r} has {len(words)} words for {len(axis_sizes)} mesh axes",
            where=text or "text",
            rule="a layout has one word for each mesh axis",
            fix=f"{len(axis_sizes)} words, each {_choice(shape)}",
        )
    partial: list[Reduction | None] = [None] * len(words)
    cuts: list[_Cut] = []
    for axis, word in enumerate(words):
        if match := _WORD.fullmatch(word):
            cuts.append(_cut(axis, word, match, shape))
        elif match := _PARTIAL.fullmatch(word):
            partial[axis] = _reduction(word, match["reduction"])
        elif word != "R":
            raise LayoutError(f"{word!r} is not a placement", where=text, rule=_EXAMPLE, fix=_choice(shape))
    splits = tuple(_ordered(dim, cuts, order, text) for dim in range(len(shape)))
    return make(shape, axis_sizes, splits, tuple(partial))


def _check_sizes(axis_sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if not axis_sizes or min(axis_sizes) < 1:
        raise LayoutError(
            f"{list(axis_sizes)} is not a mesh",
            rule="a mesh has axes of at least one rank each",
            fix="axis_sizes=(4, 8)",
        )
    if shape and min(shape) < 0:
        raise LayoutError(f"{list(shape)} is not a shape", rule="sizes are not negative", fix="shape=(8192, 8192)")


def _cut(axis: int, word: str, match: re.Match[str], shape: tuple[int, ...]) -> _Cut:
    found = int(match["dim"] or match["sdim"])
    dim = found + len(shape) if found < 0 else found
    if not 0 <= dim < len(shape):
        alone = {0: "R, for a tensor without dims", 1: "S0, for a tensor of one dim"}
        raise LayoutError(
            f"{word} cuts dim {found} of a tensor of {len(shape)} dims",
            where=word,
            rule="dims count from 0",
            fix=alone.get(len(shape)) or _cuts_of(shape),
        )
    parts = int(match["parts"] or 1)
    if parts < 1:
        fix = f"S{dim} or SS{dim}/2"
        raise LayoutError(f"{word} has no parts", where=word, rule="a strided cut has one part or more", fix=fix)
    place = match["place"] or match["splace"]
    return _Cut(dim, Split(axis, parts), None if place is None else int(place))


def _reduction(word: str, name: str | None) -> Reduction:
    if name is None:
        return Reduction.SUM
    if name not in list(Reduction):
        raise LayoutError(
            f"{name or 'nothing'} is not a reduction",
            where=word,
            rule=f"P({'), P('.join(Reduction)})",
            fix=" or ".join(f"P({reduction})" for reduction in Reduction),
        )
    return Reduction(name)


def _ordered(dim: int, cuts: list[_Cut], shard_order: _Order, text: str) -> tuple[Split, ...]:
    mine = [cut for cut in cuts if cut.dim == dim]
    if dim in shard_order:
        order = list(shard_order[dim])
        if sorted(order) != [cut.split.axis for cut in mine]:
            axes = [cut.split.axis for cut in mine]
            meant_order = [axis for axis in dict.fromkeys((*order, *axes)) if axis in axes]
            raise LayoutError(
                f"shard_order has axes {order} for dim {dim}, which {text!r} cuts by axes {axes}",
                where="shard_order",
                rule="the order names each axis that cuts the dim once",
                fix=f"shard_order={{{dim}: {meant_order}}}" if axes else f"shard_order without dim {dim}",
            )
        return tuple(cut.split for cut in sorted(mine, key=lambda cut: order.index(cut.split.axis)))
    places = [cut.place for cut in mine]
    if all(place is None for place in places):
        return tuple(cut.split for cut in mine)
    if sorted(-1 if place is None else place for place in places) != list(range(len(mine))):
        raise LayoutError(
            f"the cuts of dim {dim} have places {', '.join('none' if p is None else str(p) for p in places)}",
            where=text,
            rule="where one cut of a dim says its place, all do: @0 is applied first, then @1 …",
            fix=f"no places for dim {dim}, or one for each of its cuts: 0 … {len(mine) - 1}",
        )
    return tuple(cut.split for cut in sorted(mine, key=lambda cut: cut.place or 0))


def _choice(shape: tuple[int, ...]) -> str:
    """The words that there are for a tensor."""
    return " or ".join(filter(None, ("R", _cuts_of(shape), "SS0/2" if shape else "", "P", "P(max)")))


def _cuts_of(shape: tuple[int, ...]) -> str:
    words = [f"S{dim}" for dim in range(len(shape))]
    return " or ".join(words) if len(words) <= _MOST_NAMED else f"S0 … {words[-1]}"
