"""`explain`: an aligned table of what the steps say, and words that are true of the totals."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from meshwright.reshard.draw_plan import explain_plan, format_time
from meshwright.reshard.planner.steps import StepKind
from meshwright.units import format_bytes
from tests.reshard.by_hand import plan_of

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
    plan = plan_of((2,) * 5, (64, 2), words, ("all-to-all", "0 1 2 3 4", "S0@1 S0@0 S0@4 S0@3 S0@2"), rounds=64)
    large = replace(plan.steps[0], bytes_sent=10**13, bytes_received=10**12 - 1, live_bytes=10**14, time_us=1e8)
    assert max(map(len, explain_plan(replace(plan, steps=(large,))).splitlines())) <= 110


def test_times_have_three_digits():
    assert [format_time(t) for t in (0, 3.4, 12.66, 999.0, 1234, 2.5e6)] == [
        "0 µs", "3.4 µs", "12.7 µs", "999 µs", "1.23 ms", "2.5 s"
    ]  # fmt: skip
