"""Tests of drawn slots: each computation once, in its slot, and what is held between them."""

from __future__ import annotations

import re

import pytest

from meshwright.capture.draw import draw_capture, slot_text, slot_timeline
from meshwright.errors import InputError
from meshwright.pipeline.actions import COMPUTE
from tests.capture.plans import plan


def test_each_computation_is_drawn_once_in_its_slot():
    made = plan("zb-v", ranks=4, rank=1)
    timeline = slot_timeline(made)
    expected = {(e.kind, e.stage, e.microbatch) for e in made.events if e.kind in COMPUTE}
    drawn = [(span.action.kind, span.action.stage, span.action.microbatch) for span in timeline.spans]
    assert len(drawn) == len(expected) and set(drawn) == expected
    rows = {
        (stage, slot): i
        for i, (stage, slot) in enumerate((s, k) for s, _ in made.slots for k in range(made.num_slots(s)))
    }
    slots = dict(made.slots)
    for span in timeline.spans:
        assert span.rank == rows[span.action.stage, slots[span.action.stage][span.action.microbatch]]
    for row in range(timeline.num_ranks):
        own = timeline.of_rank(row)
        assert all(a.end <= b.start for a, b in zip(own, own[1:], strict=False))


def test_a_slot_is_held_until_the_last_backward():
    lines = slot_text(plan("zb-h1", ranks=2, microbatches=2, layers=1), columns=60).splitlines()
    assert lines == ["0.0 F0──I0W0····", "0.1 ··F1────I1W1"]
    late = slot_text(plan("zb-v", ranks=4, rank=1), columns=200).splitlines()[0]
    assert re.search(r"I7─+W7$", late) and re.search(r"W0·+F7", late)


def test_a_figure_has_rows_held_times_and_a_legend(tmp_path):
    made = plan(ranks=2, microbatches=3, layers=1)
    draw_capture(made, tmp_path / "slots.svg", title="slots\nof a rank")
    text = (tmp_path / "slots.svg").read_text("utf-8")
    assert "stage 0, slot 1" in text and "held" in text and "free" in text and "rank 0" not in text
    assert len(set(re.findall(r'id="(rank\d+-\w+)"', text))) == 6


def test_a_figure_of_another_kind_is_refused(tmp_path):
    with pytest.raises(InputError):
        draw_capture(plan(), tmp_path / "slots.gif", title="")
