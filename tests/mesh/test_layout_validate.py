"""Sizes and shard orders as callers pass them: accepted in any valid form, otherwise rejected with a fix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout
from meshwright.mesh.layout_text import normalize_shard_order, normalize_sizes


def test_sizes_in_any_form_become_plain_ints() -> None:
    for value in ((4, 8), [4, 8], range(4, 12, 4), np.array([4, 8]), iter((4, 8))):
        found = normalize_sizes(value, "shape")
        assert found == (4, 8) and all(type(size) is int for size in found)
    assert normalize_sizes((), "shape") == ()


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        (4, (4,)), (4.0, (4,)), ("4", (4,)), ("4,8", (4, 8)), ("4, 8", (4, 8)), (("4",), (4,)), ((4.0, 8), (4, 8)),
        (["4", "8"], (4, 8)), ((4.5,), (4, 8)), (None, (4, 8)), ({4, 8}, (4, 8)), ({4: 8}, (4, 8)), (True, (4, 8)),
        ((True,), (4, 8)), ("S0", (4, 8)), ([[4]], (4, 8)), ((-1.0,), (4, 8)), (object(), (4, 8)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["axis_sizes", "shape"])
def test_anything_but_a_sequence_of_ints_is_rejected(value: Any, fix: tuple[int, ...], name: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse("R", **{"axis_sizes": (4,), "shape": (8,), name: value})
    error = caught.value
    assert error.what.startswith(f"{name} = ") and error.where == name and "sequence of ints" in error.rule
    assert error.fix == f"{name}={fix}"
    assert normalize_sizes(fix, name) == fix


def test_an_order_in_any_form_has_dims_from_0() -> None:
    mappings = {0: [1, 0]}, {-2: (1, 0)}, {0: np.array([1, 0])}
    for order in (*mappings, [(0, (1, 0))], ((-2, [1, 0]),), iter([(0, [1, 0])])):
        assert normalize_shard_order(order, 2) == {0: (1, 0)}
    assert normalize_shard_order({}, 0) == {}


@pytest.mark.parametrize(
    ("order", "what", "fix"),
    [
        ({0: 1}, "shard_order = {0: 1}", "no shard_order"),
        (5, "shard_order = 5", "no shard_order"),
        ("01", "shard_order = '01'", "no shard_order"),
        ([0], "shard_order = [0]", "no shard_order"),
        (["01"], "shard_order", "no shard_order"),
        ({"0": [0, 1]}, "shard_order = {'0'", "no shard_order"),
        ({0: "10"}, "shard_order = {0: '10'}", "no shard_order"),
        ({0: [1.0, 0]}, "shard_order = {0", "no shard_order"),
        ({0: [True, 0]}, "shard_order = {0", "no shard_order"),
        ({0: {0, 1}}, "shard_order = {0", "no shard_order"),
        ({2: [0, 1]}, "names dim 2 of a tensor with 2 dims", "without dim 2"),
        ({-3: [0, 1]}, "names dim -3 of a tensor with 2 dims", "without dim -3"),
        ({0: [0, 1], -2: [0, 1]}, "names dim 0 twice", "dim 0 once"),
    ],
)
def test_invalid_orders_are_rejected(order: Any, what: str, fix: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse("S0 S0", (2, 2), (4, 4), order)
    error = caught.value
    assert what in error.what and fix in error.fix and error.where == "shard_order" and error.rule
