"""Layouts written as words, one for each mesh axis: `S0 R P(max) SS1/4`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.errors import LayoutError
from meshwright.mesh.intervals import Split
from meshwright.mesh.layout import Layout, Reduction

_WORD = re.compile(r"S(?P<dim>-?\d+)(@(?P<place>\d+))?|SS(?P<sdim>-?\d+)/(?P<parts>\d+)(@(?P<splace>\d+))?")
_PARTIAL = re.compile(r"P(\((?P<reduction>\w*)\))?")
_EXAMPLE = "one of R, S0, SS0/4, P, P(max) for each mesh axis, as in 'S0 R'"


@dataclass(frozen=True)
class _Cut:
    dim: int
    split: Split
    place: int | None


def parse(
    text: str, axis_sizes: tuple[int, ...], shape: tuple[int, ...], shard_order: Mapping[int, Sequence[int]]
) -> Layout:
    """See `Layout.parse`."""
    _check_sizes(axis_sizes, shape)
    words = text.replace(",", " ").split()
    if len(words) != len(axis_sizes):
        raise LayoutError(
            f"{text!r} has {len(words)} words for {len(axis_sizes)} mesh axes",
            where=text,
            rule="a layout has one word for each mesh axis",
            fix=" ".join((words + ["R"] * len(axis_sizes))[: len(axis_sizes)]),
        )
    partial: list[Reduction | None] = [None] * len(words)
    cuts: list[_Cut] = []
    for axis, word in enumerate(words):
        if match := _WORD.fullmatch(word):
            cuts.append(_cut(axis, word, match, shape))
        elif match := _PARTIAL.fullmatch(word):
            partial[axis] = _reduction(word, match["reduction"])
        elif word != "R":
            raise LayoutError(f"{word!r} is not a placement", where=text, rule=_EXAMPLE, fix=_nearest(word))
    splits = tuple(_ordered(dim, cuts, shard_order, text) for dim in range(len(shape)))
    _check_order(shard_order, shape, cuts)
    return Layout(shape, axis_sizes, splits, tuple(partial))


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
        fix = word.replace(str(found), str(len(shape) - 1), 1) if shape else "R"
        raise LayoutError(
            f"{word} cuts dim {found} of a tensor of {len(shape)} dims", where=word, rule="dims count from 0", fix=fix
        )
    parts = int(match["parts"] or 1)
    if parts < 1:
        raise LayoutError(f"{word} has no parts", where=word, rule="a strided cut has one part or more", fix=f"S{dim}")
    place = match["place"] or match["splace"]
    return _Cut(dim, Split(axis, parts), None if place is None else int(place))


def _reduction(word: str, name: str | None) -> Reduction:
    if name is None:
        return Reduction.SUM
    if name not in list(Reduction):
        raise LayoutError(
            f"{name or 'nothing'} is not a reduction", where=word, rule=f"P({'), P('.join(Reduction)})", fix="P(sum)"
        )
    return Reduction(name)


def _ordered(dim: int, cuts: list[_Cut], shard_order: Mapping[int, Sequence[int]], text: str) -> tuple[Split, ...]:
    mine = [cut for cut in cuts if cut.dim == dim]
    if dim in shard_order:
        order = list(shard_order[dim])
        if sorted(order) != [cut.split.axis for cut in mine]:
            axes = [cut.split.axis for cut in mine]
            raise LayoutError(
                f"shard_order has axes {order} for dim {dim}, which {text!r} cuts by axes {axes}",
                where="shard_order",
                rule="the order names each axis that cuts the dim once",
                fix=f"shard_order={{{dim}: {axes}}}" if axes else f"no order for dim {dim}",
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
            fix=" ".join(f"S{dim}@{place}" for place in range(len(mine))),
        )
    return tuple(cut.split for cut in sorted(mine, key=lambda cut: cut.place or 0))


def _check_order(shard_order: Mapping[int, Sequence[int]], shape: tuple[int, ...], cuts: list[_Cut]) -> None:
    for dim in shard_order:
        if not 0 <= dim < len(shape):
            used = sorted({cut.dim for cut in cuts})
            raise LayoutError(
                f"shard_order names dim {dim} of a tensor of {len(shape)} dims",
                where="shard_order",
                rule="dims count from 0, and those that are cut may have an order",
                fix=f"dims {used}" if used else "no shard_order",
            )


def _nearest(word: str) -> str:
    upper = word.upper().replace("SHARD", "S").replace("REPLICATE", "R").replace("PARTIAL", "P").replace("(", "", 1)
    digits = re.search(r"\d+", word)
    if upper.startswith("S") and digits:
        return f"S{digits[0]}"
    return "P" if upper.startswith("P") else "R"
