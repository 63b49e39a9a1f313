"""What callers give for a layout, as plain values: sizes, and orders of cuts, or an error that says what is wrong."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from meshwright.errors import LayoutError

ORDER_FIX = "no shard_order, or for a dim the axes that cut it in the order of the cuts, as in {0: (1, 0)}"


def whole_numbers(value: Any, name: str) -> tuple[int, ...]:
    """Sizes, in order.

    Args:
        value: any sequence of whole numbers.
        name: of the argument.

    Raises:
        LayoutError: it is none.
    """
    numbers = _whole(value)
    if numbers is None:
        meant = _meant_numbers(value) or (4, 8)
        raise LayoutError(
            f"{name} = {value!r}",
            where=name,
            rule="a sequence of whole numbers, one for each " + ("mesh axis" if name == "axis_sizes" else "dim"),
            fix=f"{name}={meant}",
        )
    return numbers


def normal_order(order: Any, num_dims: int) -> dict[int, tuple[int, ...]]:
    """For tensor dims, counted from 0, the mesh axes that cut them in the order of the cuts.

    Args:
        order: a mapping of dims, or pairs of a dim and its axes.
        num_dims: of the tensor.

    Raises:
        LayoutError: it is no order, or not one of this tensor.
    """
    normal: dict[int, tuple[int, ...]] = {}
    for dim, axes in _pairs(order):
        if not -num_dims <= dim < num_dims:
            raise _refused(
                f"shard_order names dim {dim} of a tensor of {num_dims} dims",
                "dims count from 0, or from -1 backwards, and those that are cut may have an order",
                f"shard_order without dim {dim}",
            )
        if dim % num_dims in normal:
            raise _refused(
                f"shard_order {order!r} names dim {dim % num_dims} twice",
                "one entry for a dim",
                f"dim {dim % num_dims} once, with all axes that cut it",
            )
        normal[dim % num_dims] = axes
    return normal


def _pairs(order: Any) -> list[tuple[int, tuple[int, ...]]]:
    """Dims and axes, whole numbers all."""
    entries = list(order.items()) if isinstance(order, Mapping) else order
    if not isinstance(entries, Iterable) or isinstance(entries, str | bytes | Set):
        raise _refused(f"shard_order = {order!r}", "an order is a mapping of dims, or pairs", ORDER_FIX)
    found = []
    for entry in entries:
        pair = entry if isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry) == 2 else (None, None)
        dim, axes = _whole(pair[:1]), _whole(pair[1])
        if dim is None or axes is None:
            raise _refused(f"shard_order = {order!r}", "each dim has a sequence of mesh axes, by number", ORDER_FIX)
        found.append((dim[0], axes))
    return found


def _refused(what: str, rule: str, fix: str) -> LayoutError:
    return LayoutError(what, where="shard_order", rule=rule, fix=fix)


def _whole(value: Any) -> tuple[int, ...] | None:
    """The whole numbers of a sequence; None if it is no such sequence."""
    if isinstance(value, str | bytes | Mapping | Set) or not isinstance(value, Iterable):
        return None
    items = list(value)
    try:
        return None if any(isinstance(item, bool) for item in items) else tuple(map(operator.index, items))
    except TypeError:
        return None


def _meant_numbers(value: Any) -> tuple[int, ...] | None:
    """Sizes that were evidently meant: of a number by itself, of numbers as text, of floats without a fraction."""
    if isinstance(value, bool | Mapping | Set):
        return None
    listed = value.split(",") if isinstance(value, str) else value
    items = list(listed) if isinstance(listed, Sequence) else [value]
    words = [re.fullmatch(r"\s*([0-9]{1,12})(\.0*)?\s*", str(item)) for item in items]
    return tuple(int(word[1]) for word in words if word) if all(words) else None
