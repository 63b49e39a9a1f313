"""Tests of interleaved measurement on a simulated clock: order of blocks, cancellation of drift, medians."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright_bench.alternate import Alternation, alternate


class FakeMachine:
    """Steps of known cost on a simulated clock; `drift` slows down each later block."""

    def __init__(self, costs, *, drift=0.0):
        self.costs = costs
        self.drift = drift
        self.now = 0.0
        self.blocks = []
        self.calls = []

    def arms(self):
        return {name: lambda name=name: self._step(name) for name in self.costs}

    def timer(self, work):
        start = self.now
        first = len(self.calls)
        work()
        self.blocks.append(self.calls[first])
        return self.now - start

    def _step(self, name):
        self.calls.append(name)
        self.now += self.costs[name] * (1 + self.drift * len(self.blocks))


def test_two_arms_run_a_b_b_a():
    machine = FakeMachine({"ours": 1.0, "bare": 1.0})
    alternate(machine.arms(), timer=machine.timer, rounds=2, steps=3)
    assert machine.blocks == ["ours", "bare", "bare", "ours"] * 2
    assert machine.calls[:9] == ["ours"] * 3 + ["bare"] * 6


def test_more_arms_go_forward_and_back():
    machine = FakeMachine({"a": 1.0, "b": 1.0, "c": 1.0})
    alternate(machine.arms(), timer=machine.timer, rounds=1, steps=1)
    assert machine.blocks == ["a", "b", "c", "c", "b", "a"]


def test_seconds_are_per_step():
    machine = FakeMachine({"ours": 2.0, "bare": 3.0})
    timed = alternate(machine.arms(), timer=machine.timer, rounds=3, steps=5)
    assert timed.step_seconds("ours") == pytest.approx(2.0)
    assert timed.seconds["bare"] == pytest.approx((3.0, 3.0, 3.0))
    assert timed.speedup("ours", over="bare") == pytest.approx(1.5)


costs = st.floats(0.01, 100)


@given(ours=costs, bare=costs, drift=st.floats(0, 2), rounds=st.integers(1, 5), steps=st.integers(1, 4))
def test_a_steady_drift_cancels_out_of_every_round(ours, bare, drift, rounds, steps):
    machine = FakeMachine({"ours": ours, "bare": bare}, drift=drift)
    timed = alternate(machine.arms(), timer=machine.timer, rounds=rounds, steps=steps)
    assert timed.speedups("ours", over="bare") == pytest.approx([bare / ours] * rounds)


def test_the_median_ignores_a_round_that_was_disturbed():
    timed = Alternation({"ours": (1.0, 9.0, 1.0), "bare": (1.1, 1.1, 1.2)})
    assert timed.speedup("ours", over="bare") == pytest.approx(1.1)
    assert timed.spread("ours", over="bare") == pytest.approx((1.1 / 9, 1.2))
    assert timed.step_seconds("bare") == pytest.approx(1.1)
