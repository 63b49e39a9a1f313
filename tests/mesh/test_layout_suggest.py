"""Suggestions for mistyped layouts; valid layouts are returned unchanged."""

from __future__ import annotations

from hypothesis import given

from meshwright.mesh.layout import Layout
from meshwright.mesh.layout_text import suggest_layouts
from tests.mesh.test_layout import layouts


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
