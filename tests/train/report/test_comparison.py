"""Rows of predicted and measured values: what is joined, and that nothing is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.plan.time.step_time import predict_step
from meshwright.plan.traffic import Purpose
from meshwright.train.record.step_parts import StepParts
from meshwright.train.report.comparison import Compared, as_rows, compare_time
from tests.plan.plans import plan_of
from tests.plan.time.constant_rates import constant_rates

RANKS = (StepParts(1.0, 0.25, 0.5, 0.125, 0.75, 0.0625, 0.0), StepParts(2.0, 0.25, 1.5, 0.375, 0.25, 0.1875, 0.0))


def predicted(**parts):
    """A prediction with other parts, in µs."""
    time = predict_step(plan_of("llama-tiny"), constant_rates())
    return replace(time, parts=parts, total=sum(parts.values()))


TIME = predicted(products=4e6, attention=3e6, memory=2e6, recompute=1e6, host=5e5, weights=2.5e5, scalars=1.25e5,
                 bubble=1e5, cores=2e5, optimizer=3e5, step=4e5)  # fmt: skip


def test_on_a_cpu_computation_and_communication_are_apart():
    rows = {one.name: (one.predicted, one.measured) for one in compare_time(TIME, RANKS, on_cpu=True)}
    expected = {
        "forward and backward": (10.5, 1.5), "exposed communication": (0.375, 1.0), "pipeline bubble": (0.1, 0.25),
        "optimizer": (0.3, 0.5), "waiting for a core": (0.2, 0.125), "data and other": (0.4, 0.25),
        "a step": (11.875, 3.625),
    }  # fmt: skip
    assert rows.keys() == expected.keys()
    assert all(rows[name] == pytest.approx(values) for name, values in expected.items())


def test_on_a_gpu_they_are_one():
    rows = {one.name: (one.predicted, one.measured) for one in compare_time(TIME, RANKS, on_cpu=False)}
    assert rows["computation and communication"] == pytest.approx((10.875, 2.5))
    assert "exposed communication" not in rows and rows["a step"] == pytest.approx((11.875, 3.625))


def test_every_purpose_is_communication():
    """None is counted as computation, or forgotten."""
    time = predicted(**{str(purpose): 1e6 for purpose in Purpose if purpose != Purpose.OPTIMIZER})
    rows = {one.name: one.predicted for one in compare_time(time, RANKS, on_cpu=True)}
    assert rows["exposed communication"] == rows["a step"] == len(Purpose) - 1


def test_differences_are_of_the_predicted_value():
    found = [Compared("a", 2.0, 3.0), Compared("b", 2.0, 2.0), Compared("c", 0.0, 4.0)]
    assert [row[1:] for row in as_rows(found, str)] == [
        ("2.0", "3.0", "+50.0%"), ("2.0", "2.0", "0"), ("0.0", "4.0", "+4.0"),
    ]  # fmt: skip
