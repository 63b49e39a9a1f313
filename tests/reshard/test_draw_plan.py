"""Pictures of plans: each box is its owner's, copies and partial values are sheets, pictures are the same each time."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import numpy as np
import pytest

from meshwright.errors import InputError
from meshwright.mesh.layout import Layout
from meshwright.reshard.draw_plan import (
    downsample,
    draw_plan,
    explain_plan,
    rank_colors,
    rank_labels,
    sheets,
    shown_dims,
)
from meshwright.reshard.planner.steps import StepKind
from meshwright.units import format_bytes, format_time
from tests.reshard.by_hand import plan_of

PLAN = plan_of((2, 4), (16, 24), "P R", ("reduce-scatter", "0", "S0 R"), ("slice", "", "S0 S1"))


def layout(text: str, mesh=(2, 4), shape=(16, 24)) -> Layout:
    return Layout.parse(text, mesh, shape)


@pytest.mark.parametrize(
    "one",
    [
        layout("S0 S1"), layout("S1 S0"), layout("S0 R"), layout("R P(max)"), layout("S0@1 S0@0"), layout("SS1/3 S1"),
        layout("S0 S1", shape=(5, 7)), layout("S0 S0", shape=(3,)), layout("R S0", shape=(9,)), layout("R P", shape=()),
        layout("S2 S0", shape=(4, 2, 6)), layout("S2 S1 S0", (2, 2, 3), (5, 4, 3)), layout("R R", shape=(4, 4, 4)),
        layout("S0 R", shape=(0, 4)),
    ],
    ids=lambda one: f"{one} of {one.shape}",
)  # fmt: skip
def test_every_element_lies_in_a_box_of_a_rank_that_has_it(one):
    dims = shown_dims([one])
    found = sheets(one, dims)
    num_sheets = np.prod([size for axis, size in enumerate(one.axis_sizes) if axis not in one.sharded_axes()])
    assert len(found) == (num_sheets if np.prod(one.shape) else 0)
    for sheet in found:
        for down in np.ndindex(*(one.shape[dim] for dim in dims.down)):
            for right in np.ndindex(*(one.shape[dim] for dim in dims.right)):
                row, column = box_at(one, dims.down, down, sheet.rows), box_at(one, dims.right, right, sheet.columns)
                rank = sheet.ranks[row, column]
                for dim, index in zip((*dims.down, *dims.right), (*down, *right), strict=True):
                    assert any(s.start <= index < s.stop for s in one.local_slices(int(rank))[dim])


def box_at(one: Layout, dims: tuple[int, ...], index: tuple[int, ...], edges) -> int:
    """Where the element's middle lies, the later dims inside the segments of the earlier ones."""
    low, length = 0.0, 1.0
    for place, (dim, i) in enumerate(zip(dims, index, strict=True)):
        cuts = sorted({0, one.shape[dim]} | {edge for rank in range(one.num_ranks())
                       for s in one.local_slices(rank)[dim] for edge in (s.start, s.stop)})  # fmt: skip
        segment = max(at for at, cut in enumerate(cuts[:-1]) if cut <= i)
        if place + 1 < len(dims):
            low += length * cuts[segment] / one.shape[dim]
            length *= (cuts[segment + 1] - cuts[segment]) / one.shape[dim]
        else:
            low += length * (i + 0.5) / one.shape[dim]
    return int(np.searchsorted(edges, low, "right")) - 1


def test_sheets_are_disjoint_in_their_ranks():
    found = sheets(layout("S0 P"), shown_dims([layout("S0 P")]))
    assert [sorted(set(sheet.ranks.ravel().tolist())) for sheet in found] == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_samples_have_the_owner_of_where_they_are():
    sheet = sheets(layout("S0 S1", (16, 16), (64, 64)), shown_dims([layout("S0 S1")]))[0]
    small = downsample(sheet, 8)
    assert small.ranks.tolist() == sheet.ranks[1::2, 1::2].tolist()
    assert downsample(sheet, 16).ranks.tolist() == sheet.ranks.tolist()


@pytest.mark.parametrize("sizes", [(8,), (4, 8), (2, 2, 2), (1, 6), (1,), (32, 32)])
def test_ranks_have_different_colors_of_the_screen(sizes):
    colors = rank_colors(sizes)
    assert len(colors) == np.prod(sizes) and ((colors >= 0) & (colors <= 1)).all()
    if len(colors) <= 64:
        apart = np.abs(colors[:, None] - colors[None, :]).max(2) + np.eye(len(colors))
        assert apart.min() > 0.02


def test_ranks_are_named_as_fully_as_there_is_room():
    assert rank_labels([3]) == ["3"]
    assert rank_labels([0, 1, 2, 3]) == ["0–3", "0…"]
    assert rank_labels([0, 8]) == ["0 8", "0 … 8", "0…"]
    assert rank_labels(list(range(0, 64, 8)))[0] == "0 … 56"


def svg(plan, tmp_path, name="a.svg") -> str:
    draw_plan(plan, str(tmp_path / name))
    return (tmp_path / name).read_text("utf-8")


def words_of(picture: str) -> list[str]:
    return [re.sub("<.*?>", "", words).strip() for words in re.findall(r"<text.*?</text>", picture, re.DOTALL)]


def test_states_steps_and_bytes_are_in_the_picture(tmp_path):
    picture = svg(PLAN, tmp_path)
    assert re.findall(r'id="(state-\d)"', picture) == ["state-0", "state-1", "state-2"]
    sheets_of = re.findall(r'id="(?:state-)?(.+)-sheet-(\d)"', picture)
    behind = [("0", str(depth)) for depth in (3, 2, 1, 0)]
    assert sheets_of == [("mesh", "0"), *behind, *(("1", depth) for _, depth in behind), ("2", "0")]
    words = words_of(picture)
    for expected in ("P R", "S0 R", "S0 S1", "reduce-scatter", "slice", "nothing is sent", "Σ", "0–7", "0–3", "4–7",
                     "before · 768 B per rank", "after step 1 · 384 B per rank", "after · 96 B per rank",
                     "≤ 384 B per rank", "4 replicas (axis 1) · 2 partial (axis 0)", "4 replicas (axis 1)",
                     "8 ranks"):  # fmt: skip
        assert expected in words, expected
    assert "each rank receives at most 384 B" in picture


def test_the_same_plan_gives_the_same_bytes(tmp_path):
    assert svg(PLAN, tmp_path) == svg(PLAN, tmp_path, "b.svg")


@pytest.mark.parametrize(
    "plan",
    [
        plan_of((2, 2), (8, 8), "S0 R"),
        plan_of((4,), (3,), "S0", ("all-gather", "0", "R")),
        plan_of((2,), (), "P", ("all-reduce", "0", "R")),
        plan_of((2,), (0, 3), "S0", ("all-gather", "0", "R")),
        plan_of((2, 2), (4, 6, 8), "S2 S1", ("all-to-all", "0 1", "S1 S2")),
    ],
    ids=lambda one: f"{one.src} → {one.dst} of {one.src.shape}",
)
def test_all_shapes_can_be_drawn(plan, tmp_path):
    draw_plan(plan, str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_thousand_ranks_stay_a_small_picture(tmp_path):
    plan = plan_of((32, 64), (2048, 512), "S0 S0", ("slice", "", "S0 S0"), bound=0)
    picture = svg(plan, tmp_path)
    assert len(picture) < 1_000_000 and "2,048 ranks" in words_of(picture)


def test_no_picture_of_another_kind(tmp_path):
    with pytest.raises(InputError, match="unknown figure format"):
        draw_plan(PLAN, str(tmp_path / "a.pdf"))


WHOLE = plan_of(
    (4, 8), (64, 64), "S0 S1", ("all-gather", "1", "S0 R"), ("slice", "", "S0 S0"), ("all-to-all", "0 1", "S1 S0")
)  # fmt: skip


def test_the_table_says_what_the_steps_say():
    lines = explain_plan(WHOLE).splitlines()
    assert lines[0] == "S0 S1 → S1 S0 · 64 × 64 bf16 on a mesh of 4 × 8"
    assert lines[1].split("  ")[0] == "step" and len(lines) == 2 + len(WHOLE.steps) + 2
    for number, (line, step) in enumerate(zip(lines[2:], WHOLE.steps, strict=False), start=1):
        cells = line.split()
        assert cells[0] == str(number) and cells[1] == step.kind and str(step.dst) in line
        assert line.endswith(format_bytes(step.live_bytes))
        if step.kind is StepKind.SLICE:
            assert line.count("–") == 3
        else:
            assert f"{format_bytes(step.bytes_received)}  " in line and format_time(step.time_us) in line


def test_columns_are_aligned():
    lines = explain_plan(WHOLE).splitlines()[1:5]
    ends = [[line.index(word) + len(word) for word in line.split("  ") if word.strip()] for line in lines]
    assert len({at[-1] for at in ends}) == 1
    kinds = ("all-gather", "slice", "all-to-all")
    assert len({line.index(kind) for line, kind in zip(lines[1:], kinds, strict=True)}) == 1


def test_totals_are_set_against_the_bound():
    one = plan_of((4, 8), (64, 64), "S0 S1", ("all-to-all", "0 1", "S1 S0"))
    least = f"receives at most {format_bytes(one.bytes_received)}, the lower bound for any method"
    assert least in explain_plan(one)
    ratio = WHOLE.bytes_received / WHOLE.lower_bound_bytes
    assert f"{ratio:.2f} times the lower bound of {format_bytes(WHOLE.lower_bound_bytes)}" in explain_plan(WHOLE)
    assert f"sends at most {format_bytes(WHOLE.bytes_sent)}" in explain_plan(WHOLE)
    assert f"holds at most {format_bytes(WHOLE.peak_bytes)}" in explain_plan(WHOLE)
    free = plan_of((2, 2), (8, 8), "R R", ("slice", "", "S0 S1"))
    assert "nothing is received" in explain_plan(free)


def test_one_line_when_nothing_has_to_move():
    text = explain_plan(plan_of((2, 2), (8, 8), "S0 R"))
    assert "\n" not in text and text.endswith("nothing has to move")


def test_rounds_are_named():
    assert "all-to-all ×3 " in explain_plan(plan_of((2, 2), (8, 8), "S0 S1", ("all-to-all", "0 1", "S1 S0"), rounds=3))


@pytest.mark.parametrize("seed", range(5))
def test_lines_are_short(seed):
    """Also of long layouts with large figures."""
    draw = random.Random(seed)
    words = " ".join(f"SS0/{draw.choice([2, 4, 16])}" for _ in range(5))
    wide = plan_of((2,) * 5, (64, 2), words, ("all-to-all", "0 1 2 3 4", "S0@1 S0@0 S0@4 S0@3 S0@2"), rounds=64)
    large = replace(wide.steps[0], bytes_sent=10**13, bytes_received=10**12 - 1, live_bytes=10**14, time_us=1e8)
    assert max(map(len, explain_plan(replace(wide, steps=(large,))).splitlines())) <= 110
