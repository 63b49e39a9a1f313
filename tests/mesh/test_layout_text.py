"""Texts, sizes and shard orders of layouts, in any valid form, or rejected with a fix: one that is a layout can be
parsed and is what the text evidently meant.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout
from meshwright.mesh.layout_text import normalize_shard_order, normalize_sizes, suggest_layouts
from meshwright.mesh.shard_intervals import Reduction
from tests.mesh.test_layout import layouts

AXIS_SIZES, SHAPE = (2, 3), (4, 4)
A_LAYOUT = re.compile(r"[RSP]\S*( [RSP]\S*)*")
"""Pattern of a fix that is a layout and not a sentence: all its words begin like placements."""


def error_of(text: object, axis_sizes: tuple[int, ...] = AXIS_SIZES, shape: tuple[int, ...] = SHAPE) -> LayoutError:
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text, axis_sizes, shape)  # type: ignore[arg-type]
    assert caught.value.what and caught.value.where and caught.value.rule and caught.value.fix
    return caught.value


MEANT = {
    "S0S1": "S0 S1", "RS0": "R S0", "PP": "P P", "P(max)S0": "P(max) S0", "[S0, S1]": "S0 S1", "S0;R": "S0 R",
    "_StridedShard(dim=0, sf=2) R": "SS0/2 R", "_StridedShard(0, split_factor=2), R": "SS0/2 R",
    "_S(0, 2) R": "SS0/2 R", "StridedShard(1,2) S0": "SS1/2 S0", "ss0/2 s1": "SS0/2 S1", "SS 0 / 2 R": "SS0/2 R",
    "p(max) R": "P(max) R", "Partial(max) R": "P(max) R", "P(MAX) R": "P(max) R", "P(mean) R": "P(avg) R",
    "P(average) R": "P(avg) R", "P(prod) R": "P(product) R", "P(minimum) R": "P(min) R", "Partial('sum') R": "P R",
    "Partial(reduce_op=max) R": "P(max) R", "P() R": "P R", "p R": "P R", "_Partial R": None, "MaskPartial R": None,
    "S 0 R": "S0 R", "S 0": "S0 R", "S٠ R": "S0 R", "S٣ R": None, "Shard(1) R": "S1 R", "Shard(dim=1) R": "S1 R",
    "S(0) S(-1)": "S0 S-1", "shard(-1), replicate": "S-1 R", "Replicate() R": "R R", "r r": "R R",
    "(Shard(dim=0), Partial(sum))": "S0 P", "S0": "S0 R", "S0 S1 R": "S0 S1", "S0 S1 S0": None,
    "S0@0 S0": "S0@0 S0@1", "S0@1 S0": "S0@1 S0@0", "S0 S0@0": "S0@1 S0@0", "S0@1 S0@2": "S0@0 S0@1",
    "S0@2 SS0/2@1": "S0@1 SS0/2@0", "S0@1 S0@1": None, "S1 S0@1": "S1 S0@0", "s0@1 s0@0": "S0@1 S0@0",
    "S0 Q": None, "P(med) R": None, "reduce R": None, "Sum R": None, "S R": None, "SS0 R": None, "S0/2 R": None,
    "S9 R": None, "shard(9) R": None, "SS0/0 R": None, "": None, "S0 R extra": None, "S0 1": None, "RSVP R": None,
    "S" + "9" * 5000 + " R": None, "P(max R": None,
}  # fmt: skip
"""Invalid texts, and the layout that each evidently means, or None."""


@pytest.mark.parametrize("text", MEANT)
def test_a_fix_is_what_was_evidently_meant_or_a_choice(text: str) -> None:
    fix, wanted = error_of(text).fix, MEANT[text]
    if wanted is None:
        assert not A_LAYOUT.fullmatch(fix), f"{fix} was not evidently meant"
    else:
        assert fix == wanted
        Layout.parse(fix, AXIS_SIZES, SHAPE)


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("S0 Q", "R or S0 or S1 or SS0/2 or P or P(max)"),
        ("S9 R", "S0 or S1"),
        ("P(med) R", " or ".join(f"P({reduction})" for reduction in Reduction)),
        ("SS1/0 R", "S1 or SS1/2"),
    ],
)
def test_each_word_of_a_choice_can_be_read_in_its_place(text: str, choice: str) -> None:
    assert error_of(text).fix == choice
    bad = next(word for word in text.split() if word not in ("S0", "R"))
    for word in choice.split(" or "):
        Layout.parse(text.replace(bad, word), AXIS_SIZES, SHAPE)


@pytest.mark.parametrize(
    ("shape", "choice"),
    [((), "R, for a 0-d tensor"), ((8,), "S0, for a 1-d tensor"), ((1,) * 6, "S0 … S5")],
)
def test_a_choice_is_one_for_the_tensor(shape: tuple[int, ...], choice: str) -> None:
    assert error_of("S9 R", shape=shape).fix == choice


def mistyped(text: str, draw: st.DataObject) -> str:
    """Return the text of a layout with a few typos."""
    wrongs = [
        ("S", "s"), ("S", "Shard"), ("P", "Partial"), ("R", "replicate"), (" ", ""), (" ", ", "), ("0", "9"),
        ("max", "mean"), ("@0", ""), ("@1", "@0"), ("/", ""), ("SS", "_StridedShard"), ("S", "S "), ("(", ""),
    ]  # fmt: skip
    for old, new in draw.draw(st.lists(st.sampled_from(wrongs), max_size=3)):
        text = text.replace(old, new, draw.draw(st.integers(1, 2)))
    return text


WORDS = ["S0", "S1", "SS0/2", "S0@1", "S", "P", "P(max)", "P(", ")", "r", "Partial(MAX)", "_S(0, 2)", "@0", "/", "٣"]


@settings(max_examples=150)
@given(st.data(), layouts() | st.none())
def test_whatever_is_tried_a_fix_that_is_a_layout_can_be_read(data: st.DataObject, layout: Layout | None) -> None:
    axis_sizes, shape = (layout.axis_sizes, layout.shape) if layout else (AXIS_SIZES, SHAPE)
    if layout is None:
        text = "".join(data.draw(st.lists(st.sampled_from([*WORDS, " "]) | st.characters(), max_size=8)))
    else:
        text = mistyped(str(layout), data)
    try:
        Layout.parse(text, axis_sizes, shape)
    except LayoutError as error:
        assert error.what and error.rule and error.fix
        if A_LAYOUT.fullmatch(error.fix):
            Layout.parse(error.fix, axis_sizes, shape)


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        (["S0", "R"], "S0 R"),
        (("shard(0)", "p"), "S0 P"),
        (None, "a string of 2 placements"),
        (7, "a string"),
        ([1], "a string"),
    ],
)
def test_a_layout_is_a_string(text: object, fix: str) -> None:
    error = error_of(text)
    assert error.fix.startswith(fix) and "not a string" in error.what


def test_placements_are_not_a_string_either() -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    strided = _StridedShard(1, split_factor=2)
    for placements, fix in (([Shard(0), Partial("avg")], "S0 P(avg)"), ((strided, Replicate()), "SS1/2 R")):
        assert error_of(placements).fix == fix
        words = " ".join(repr(placement) for placement in placements)
        assert error_of(words).fix == fix


@pytest.mark.parametrize(
    ("order", "fix"),
    [
        ({0: [1]}, {0: [1, 0]}),
        ({0: [1, 1]}, {0: [1, 0]}),
        ({0: [0, 1, 2]}, {0: [0, 1]}),
        ({-2: [1]}, {0: [1, 0]}),
    ],
)
def test_an_order_that_does_not_fit_keeps_what_it_says(order: dict[int, list[int]], fix: dict[int, list[int]]) -> None:
    with pytest.raises(LayoutError, match="shard_order has axes") as caught:
        Layout.parse("S0 S0", (2, 2), (4, 4), order)
    assert caught.value.fix == f"shard_order={fix}"
    Layout.parse("S0 S0", (2, 2), (4, 4), fix)


@given(layouts())
def test_a_layout_means_itself(layout: Layout) -> None:
    assert next(suggest_layouts(str(layout), len(layout.axis_sizes))) == str(layout)


@given(layouts())
def test_case_spaces_and_long_names_change_no_meaning(layout: Layout) -> None:
    text, num_axes = str(layout), len(layout.axis_sizes)
    longer = text.replace("R", "Replicate()").replace("P", "Partial").replace("SS", "s_").replace("S", "Shard ")
    longer = longer.replace("s_", "_StridedShard ")
    for other in (text.lower(), text.replace(" ", ""), text.replace(" ", " , "), longer):
        assert next(suggest_layouts(other, num_axes)) == text, other


def test_copies_fill_up_and_nothing_else_is_left_out() -> None:
    assert next(suggest_layouts("S0", 3)) == "S0 R R"
    assert next(suggest_layouts("S0 R R R", 2)) == "S0 R"
    assert not [*suggest_layouts("S0 R S1", 2)] and not [*suggest_layouts("", 2)] and not [*suggest_layouts("S0 !", 2)]


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
        *((order, "shard_order", "no shard_order") for order in (
            {0: 1}, 5, "01", [0], ["01"], {"0": [0, 1]}, {0: "10"}, {0: [1.0, 0]}, {0: [True, 0]}, {0: {0, 1}},
        )),
        ({2: [0, 1]}, "names dim 2 of a tensor with 2 dims", "without dim 2"),
        ({-3: [0, 1]}, "names dim -3 of a tensor with 2 dims", "without dim -3"),
        ({0: [0, 1], -2: [0, 1]}, "names dim 0 twice", "dim 0 once"),
    ],
)  # fmt: skip
def test_invalid_orders_are_rejected(order: Any, what: str, fix: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse("S0 S0", (2, 2), (4, 4), order)
    error = caught.value
    assert what in error.what and fix in error.fix and error.where == "shard_order" and error.rule
