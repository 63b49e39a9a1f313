"""Where a step's time went, from readings of clocks that are made up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.pipeline.actions import Action, ActionKind
from meshwright.pipeline.timeline import Reading, ThreadClock, TimedOperation, compute_spans
from meshwright.train.record.step_parts import raw_parts

KINDS = [ActionKind.FORWARD, ActionKind.SEND_FORWARD, ActionKind.BACKWARD, ActionKind.REDUCE]
AMOUNT = st.floats(0, 1)
AMOUNTS = ("wait", "compute", "blocked_inside", "send", "norm", "reduce", "update", "queued", "data")


class Clocks:
    """Clocks that are moved by hand."""

    def __init__(self):
        self.now = Reading(0.0, 0.0, 0.0)

    def move(self, *, cpu=0.0, queued=0.0, blocked=0.0):
        self.now = Reading(self.now.wall + cpu + queued + blocked, self.now.cpu + cpu, self.now.queued + queued)
        return self.now


def step(*, wait, compute, blocked_inside, send, norm, reduce, update, queued, data):
    """A forward with its data, and a send, then the end of the step."""
    clocks = Clocks()
    begin = clocks.now
    start = clocks.move(blocked=wait)
    in_data = clocks.move(blocked=data) - start
    end = clocks.move(cpu=compute, blocked=blocked_inside, queued=queued)
    forward = TimedOperation((Action(ActionKind.FORWARD, 0, 0),), begin, start, end, None)
    sent = clocks.move(blocked=send)
    message = TimedOperation((Action(ActionKind.SEND_FORWARD, 0, 0),), end, end, sent, None)
    marks = {"begin": begin, "reduce": clocks.move(cpu=norm), "reduced": clocks.move(blocked=reduce)}
    marks["end"] = clocks.move(cpu=update)
    return raw_parts([forward, message], in_data, **marks)


@given(st.fixed_dictionaries(dict.fromkeys(AMOUNTS, AMOUNT)), AMOUNT)
def test_every_part_is_found(amounts, idle):
    parts = step(**amounts).split(idle)
    waits = amounts["wait"] + amounts["reduce"]
    expected = {
        "compute": amounts["compute"],
        "data": amounts["data"],
        "bubble": min(waits, idle),
        "communication": amounts["blocked_inside"] + amounts["send"] + waits - min(waits, idle),
        "optimizer": amounts["norm"] + amounts["update"],
        "core": amounts["queued"],
        "other": 0.0,
    }
    assert vars(parts) == pytest.approx(expected, abs=1e-9)
    assert parts.total() == pytest.approx(sum(amounts.values()), abs=1e-9)


def test_a_pair_computes_while_its_thread_is_blocked():
    clocks = Clocks()
    begin = clocks.now
    end = clocks.move(cpu=1.0, blocked=2.0)
    actions = Action(ActionKind.FORWARD, 0, 1), Action(ActionKind.BACKWARD, 1, 0)
    pair = TimedOperation(actions, begin, begin, end, 0.5)
    parts = raw_parts([pair], begin, begin=begin, reduce=end, reduced=end, end=end)
    assert (parts.compute, parts.blocked) == (3.0, 0.0)
    assert [(span.start, span.end) for span in compute_spans([pair], rank=0)] == [(0.0, 0.5), (0.5, 3.0)]


def test_readings_of_a_thread_never_run_back():
    clock = ThreadClock()
    readings = [clock() for _ in range(100)]
    clock.close()
    clock.close()
    for before, after in zip(readings, readings[1:], strict=False):
        assert min(after - before) >= 0
