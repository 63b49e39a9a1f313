"""Parser for layouts in text form, one placement per mesh axis: `S0 R P(max) SS1/4`.

An error's fix is a complete, valid layout if `suggest_layouts` finds one, and otherwise a list of valid placements.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeVar

from meshwright.errors import LayoutError
from meshwright.mesh.shard_intervals import Reduction, Split
from meshwright.units import counted

_N = r"[0-9]{1,9}"
_SHARD = re.compile(
    rf"S(?P<dim>-?{_N})(@(?P<position>{_N}))?|SS(?P<strided_dim>-?{_N})/(?P<parts>{_N})(@(?P<strided_position>{_N}))?"
)
_PARTIAL = re.compile(r"P(\((?P<reduction>\w*)\))?")
_EXAMPLE = "one of R, S0, SS0/4, P, P(max) per mesh axis, e.g. 'S0 R'"
_MAX_LISTED_DIMS = 4
"""Maximum number of dims that an error lists individually."""

_Order = Mapping[int, Sequence[int]]
_Sizes = tuple[int, ...]
L = TypeVar("L")
"""The layout class, which `layout` defines and passes in as `make`."""
Make = Callable[[_Sizes, _Sizes, tuple[tuple[Split, ...], ...], tuple[Reduction | None, ...]], L]
"""Constructor of a layout from its shape, mesh axis sizes, splits per dim and reduction per axis."""
_NUMBER = r"-?\d{1,9}"
_POSITION = r"(?:\s*@\s*(?P<{}>\d{{1,9}}))?"
_TOKEN = re.compile(
    r"(?P<replicated>replicated?|r)(?:\s*\(\s*\))?"
    # SS0/2, _StridedShard(dim=0, sf=2), _S(0, 2)
    rf"|(?:_?stridedshard|_s|ss)\s*\(?\s*(?:dim\s*=\s*)?(?P<strided>{_NUMBER})\s*\)?\s*"
    rf"(?:/|,\s*(?:(?:sf|split_factor)\s*=)?)\s*(?P<parts>\d{{1,9}})\s*\)?{_POSITION.format('strided_position')}"
    rf"|(?:shard|s)\s*\(?\s*(?:dim\s*=\s*)?(?P<dim>{_NUMBER})\s*\)?{_POSITION.format('position')}"
    r"|(?P<partial>partial|p)(?:\s*\(\s*(?:reduce_op\s*=\s*)?['\"]?(?P<reduction>\w*)['\"]?\s*\))?",
    re.IGNORECASE,
)
_SEPARATOR = re.compile(r"[\s,;|()\[\]'\"]*")
_REDUCTIONS = {
    **{reduction.value: reduction for reduction in Reduction},
    "": Reduction.SUM, "add": Reduction.SUM, "mean": Reduction.AVG, "average": Reduction.AVG,
    "maximum": Reduction.MAX, "minimum": Reduction.MIN, "prod": Reduction.PRODUCT, "mul": Reduction.PRODUCT,
}  # fmt: skip


@dataclass(frozen=True)
class _ParsedShard:
    dim: int
    split: Split
    position: int | None


def parse(text: Any, axis_sizes: Any, shape: Any, shard_order: Any, *, make: Make[L]) -> L:
    """Parse a layout, as documented in `Layout.parse`."""
    axis_sizes, shape = normalize_sizes(axis_sizes, "axis_sizes"), normalize_sizes(shape, "shape")
    _check_sizes(axis_sizes, shape)
    order = {} if shard_order is None else normalize_shard_order(shard_order, len(shape))
    try:
        return _read(text, axis_sizes, shape, order, make)
    except LayoutError as error:
        words = text if isinstance(text, str) else " ".join(map(str, text)) if isinstance(text, Sequence) else ""
        fixes = (
            fix for fix in suggest_layouts(words, len(axis_sizes)) if _is_valid(fix, axis_sizes, shape, order, make)
        )
        fix = next(fixes, error.fix)
        raise LayoutError(error.what, where=error.where, rule=error.rule, fix=fix) from None


def _is_valid(text: str, axis_sizes: _Sizes, shape: _Sizes, order: _Order, make: Make[Any]) -> bool:
    try:
        _read(text, axis_sizes, shape, order, make)
    except LayoutError:
        return False
    return True


def _read(text: Any, axis_sizes: _Sizes, shape: _Sizes, order: _Order, make: Make[L]) -> L:
    if not isinstance(text, str):
        what = f"layout is a {type(text).__name__}, not a string: {text!r}"
        fix = f"a string of {counted(len(axis_sizes), 'placement')}, each {_choice(shape)}"
        raise LayoutError(what, where="text", rule=f"a layout is written as {_EXAMPLE}", fix=fix)
    words = text.replace(",", " ").split()
    if len(words) != len(axis_sizes):
        what = f"{text!r} has {counted(len(words), 'placement')} for {counted(len(axis_sizes), 'mesh axis')}"
        fix = f"{counted(len(axis_sizes), 'placement')}, each {_choice(shape)}"
        raise LayoutError(what, where=text or "text", rule="a layout has one placement per mesh axis", fix=fix)
    partial: list[Reduction | None] = [None] * len(words)
    shards: list[_ParsedShard] = []
    for axis, word in enumerate(words):
        if match := _SHARD.fullmatch(word):
            shards.append(_parse_shard(axis, word, match, shape))
        elif match := _PARTIAL.fullmatch(word):
            partial[axis] = _parse_reduction(word, match["reduction"])
        elif word != "R":
            raise LayoutError(f"{word!r} is not a valid placement", where=text, rule=_EXAMPLE, fix=_choice(shape))
    splits = tuple(_ordered_splits(dim, shards, order, text) for dim in range(len(shape)))
    return make(shape, axis_sizes, splits, tuple(partial))


def _check_sizes(axis_sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if not axis_sizes or min(axis_sizes) < 1:
        what = f"axis_sizes = {list(axis_sizes)} is not a valid mesh shape"
        rule = "a mesh has at least one axis, and every axis has at least one rank"
        raise LayoutError(what, rule=rule, fix="axis_sizes=(4, 8)")
    if shape and min(shape) < 0:
        raise LayoutError(
            f"shape = {list(shape)} has a negative size", rule="sizes must be non-negative", fix="shape=(8192, 8192)"
        )


def _parse_shard(axis: int, word: str, match: re.Match[str], shape: tuple[int, ...]) -> _ParsedShard:
    signed_dim = int(match["dim"] or match["strided_dim"])
    dim = signed_dim + len(shape) if signed_dim < 0 else signed_dim
    if not 0 <= dim < len(shape):
        special_fixes = {0: "R, for a 0-d tensor", 1: "S0, for a 1-d tensor"}
        what = f"{word} shards dim {signed_dim} of a tensor with {counted(len(shape), 'dim')}"
        rule = "dims are numbered from 0"
        raise LayoutError(what, where=word, rule=rule, fix=special_fixes.get(len(shape)) or _shard_choices(shape))
    parts = int(match["parts"] or 1)
    if parts < 1:
        fix = f"S{dim} or SS{dim}/2"
        raise LayoutError(f"{word} has split factor {parts}", where=word, rule="a split factor is at least 1", fix=fix)
    position = match["position"] or match["strided_position"]
    return _ParsedShard(dim, Split(axis, parts), None if position is None else int(position))


def _parse_reduction(word: str, name: str | None) -> Reduction:
    if name is None:
        return Reduction.SUM
    if name not in list(Reduction):
        what, rule = f"{name!r} is not a reduction", f"one of P({'), P('.join(Reduction)})"
        raise LayoutError(what, where=word, rule=rule, fix=" or ".join(f"P({reduction})" for reduction in Reduction))
    return Reduction(name)


def _ordered_splits(dim: int, shards: list[_ParsedShard], shard_order: _Order, text: str) -> tuple[Split, ...]:
    of_dim = [shard for shard in shards if shard.dim == dim]
    if dim in shard_order:
        order = list(shard_order[dim])
        if sorted(order) != [shard.split.axis for shard in of_dim]:
            axes = [shard.split.axis for shard in of_dim]
            suggested = [axis for axis in dict.fromkeys((*order, *axes)) if axis in axes]
            what = f"shard_order has axes {order} for dim {dim}, which {text!r} shards over axes {axes}"
            rule = "the order names each axis that shards the dim exactly once"
            fix = f"shard_order={{{dim}: {suggested}}}" if axes else f"shard_order without dim {dim}"
            raise LayoutError(what, where="shard_order", rule=rule, fix=fix)
        return tuple(shard.split for shard in sorted(of_dim, key=lambda shard: order.index(shard.split.axis)))
    positions = [shard.position for shard in of_dim]
    if all(position is None for position in positions):
        return tuple(shard.split for shard in of_dim)
    if sorted(-1 if position is None else position for position in positions) != list(range(len(of_dim))):
        what = f"the shards of dim {dim} have positions {', '.join('none' if p is None else str(p) for p in positions)}"
        rule = "either all shards of a dim give a position (@0 is applied first, then @1 …) or none does"
        fix = f"no positions for dim {dim}, or one per shard, from 0 to {len(of_dim) - 1}"
        raise LayoutError(what, where=text, rule=rule, fix=fix)
    return tuple(shard.split for shard in sorted(of_dim, key=lambda shard: shard.position or 0))


def _choice(shape: tuple[int, ...]) -> str:
    """List the placements that are valid for a tensor of this shape."""
    return " or ".join(filter(None, ("R", _shard_choices(shape), "SS0/2" if shape else "", "P", "P(max)")))


def _shard_choices(shape: tuple[int, ...]) -> str:
    words = [f"S{dim}" for dim in range(len(shape))]
    return " or ".join(words) if len(words) <= _MAX_LISTED_DIMS else f"S0 … {words[-1]}"


def suggest_layouts(text: str, num_axes: int) -> Iterator[str]:
    """Yield possible readings of the text as a layout, most likely first; some may not fit the tensor and mesh.

    Takes PyTorch's own names for placements, upper or lower case, missing or extra spaces. Leftover text or an
    ambiguous name yields none, because a wrong suggestion is worse than none.
    """
    words = _words(text)
    if not words or set(words[num_axes:]) - {"R"}:
        return
    words = (words + ["R"] * num_axes)[:num_axes]
    yield " ".join(words)
    yield " ".join(_renumbered(words))


def _words(text: str) -> list[str] | None:
    """Return the placements of a layout, or None if any of the text is unknown or ambiguous."""
    words: list[str] = []
    at = _end(_SEPARATOR.match(text, 0))
    while at < len(text):
        match = _TOKEN.match(text, at)
        word = _word(match) if match else None
        if match is None or word is None:
            return None
        words.append(word)
        at = _end(_SEPARATOR.match(text, match.end()))
    return words


def _end(match: re.Match[str] | None) -> int:
    return match.end() if match else 0


def _word(match: re.Match[str]) -> str | None:
    if match["replicated"]:
        return "R"
    if match["partial"]:
        reduction = _REDUCTIONS.get((match["reduction"] or "").lower())
        return reduction and ("P" if reduction is Reduction.SUM else f"P({reduction})")
    position = match["position"] or match["strided_position"]
    suffix = "" if position is None else f"@{int(position)}"
    return (
        f"S{int(match['dim'])}{suffix}" if match["dim"] else f"SS{int(match['strided'])}/{int(match['parts'])}{suffix}"
    )


def _renumbered(words: list[str]) -> list[str]:
    """Renumber the `@` positions of each dim from 0, filling gaps with shards that have no position."""
    renumbered = list(words)
    dims = {axis: re.split("[/@]", word.lstrip("S"))[0] for axis, word in enumerate(words) if word.startswith("S")}
    for dim in dict.fromkeys(dims.values()):
        axes = [axis for axis in dims if dims[axis] == dim]
        positions = {axis: int(words[axis].partition("@")[2]) for axis in axes if "@" in words[axis]}
        if len(set(positions.values())) < len(positions):
            continue
        order = sorted(positions, key=lambda axis: positions[axis])
        for axis in axes if positions else ():
            if axis not in positions:
                free = next(i for i in range(len(axes) + 1) if i not in positions.values())
                order.insert(min(free, len(order)), axis)
                positions[axis] = free
        for position, axis in enumerate(order):
            renumbered[axis] = f"{words[axis].partition('@')[0]}@{position}"
    return renumbered


ORDER_FIX = "no shard_order, or a mapping from dims to mesh axes in shard order, e.g. {0: (1, 0)}"


def normalize_sizes(value: Any, name: str) -> tuple[int, ...]:
    """Convert sizes to a tuple of ints.

    Args:
        value: any sequence of ints.
        name: name of the argument, for the error.

    Raises:
        LayoutError: `value` is not a sequence of ints.
    """
    sizes = _to_ints(value)
    if sizes is None:
        suggested = _suggest_sizes(value) or (4, 8)
        rule = "a sequence of ints, one per " + ("mesh axis" if name == "axis_sizes" else "dim")
        raise LayoutError(f"{name} = {value!r}", where=name, rule=rule, fix=f"{name}={suggested}")
    return sizes


def normalize_shard_order(order: Any, num_dims: int) -> dict[int, tuple[int, ...]]:
    """Return a shard order as a mapping from non-negative tensor dims to tuples of mesh axes.

    Args:
        order: a mapping from dims to axes, or pairs of a dim and its axes.
        num_dims: number of dims of the tensor.

    Raises:
        LayoutError: `order` is not a shard order, or does not fit the tensor.
    """
    normalized: dict[int, tuple[int, ...]] = {}
    for dim, axes in _pairs(order):
        if not -num_dims <= dim < num_dims:
            raise _invalid_order(
                f"shard_order names dim {dim} of a tensor with {counted(num_dims, 'dim')}",
                "dims are numbered from 0, or backwards from -1",
                f"shard_order without dim {dim}",
            )
        if dim % num_dims in normalized:
            raise _invalid_order(
                f"shard_order {order!r} names dim {dim % num_dims} twice",
                "each dim has one entry",
                f"dim {dim % num_dims} once, with all axes that shard it",
            )
        normalized[dim % num_dims] = axes
    return normalized


def _pairs(order: Any) -> list[tuple[int, tuple[int, ...]]]:
    """Convert a shard order to pairs of a dim and its axes, all as ints."""
    entries = list(order.items()) if isinstance(order, Mapping) else order
    if not isinstance(entries, Iterable) or isinstance(entries, str | bytes | Set):
        raise _invalid_order(f"shard_order = {order!r}", "shard_order is a mapping or a sequence of pairs", ORDER_FIX)
    pairs = []
    for entry in entries:
        pair = entry if isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry) == 2 else (None, None)
        dim, axes = _to_ints(pair[:1]), _to_ints(pair[1])
        if dim is None or axes is None:
            raise _invalid_order(f"shard_order = {order!r}", "each dim has a sequence of mesh axis indices", ORDER_FIX)
        pairs.append((dim[0], axes))
    return pairs


def _invalid_order(what: str, rule: str, fix: str) -> LayoutError:
    return LayoutError(what, where="shard_order", rule=rule, fix=fix)


def _to_ints(value: Any) -> tuple[int, ...] | None:
    """Convert a sequence of ints to a tuple; return None for any other value."""
    if isinstance(value, str | bytes | Mapping | Set) or not isinstance(value, Iterable):
        return None
    items = list(value)
    try:
        return None if any(isinstance(item, bool) for item in items) else tuple(map(operator.index, items))
    except TypeError:
        return None


def _suggest_sizes(value: Any) -> tuple[int, ...] | None:
    """Guess the intended sizes from a single number, numbers as text, or floats with integer values."""
    if isinstance(value, bool | Mapping | Set):
        return None
    listed = value.split(",") if isinstance(value, str) else value
    items = list(listed) if isinstance(listed, Sequence) else [value]
    words = [re.fullmatch(r"\s*([0-9]{1,12})(\.0*)?\s*", str(item)) for item in items]
    return tuple(int(word[1]) for word in words if word) if all(words) else None
