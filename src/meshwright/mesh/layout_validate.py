"""Validation and normalization of layout arguments: sizes and shard orders."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from meshwright.errors import LayoutError
from meshwright.units import counted

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
        raise LayoutError(
            f"{name} = {value!r}",
            where=name,
            rule="a sequence of ints, one per " + ("mesh axis" if name == "axis_sizes" else "dim"),
            fix=f"{name}={suggested}",
        )
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
