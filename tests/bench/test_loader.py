"""Tests of `bench loader`: both sides run the same steps, and the figures name the times of source and step."""

from __future__ import annotations

import pytest

from meshwright_bench.loader.benchmark import AHEAD, PREFETCHED, SYNCHRONOUS, block_ms, case_figures
from tests.bench.tiny import by_name


@pytest.mark.parametrize("side", [PREFETCHED, SYNCHRONOUS])
def test_the_first_steps_of_a_block_do_not_count(side):
    assert len(block_ms(side, 0, 0, steps=AHEAD + 4)) == 3


def test_figures_have_both_sides_and_a_target():
    figures = by_name(case_figures(0.1, 0.2, rounds=2, steps=AHEAD + 2))
    assert list(figures) == [f"source_0.1_step_0.2.{name}" for name in ("prefetched_ms", "synchronous_ms", "stall")]
    assert all(figure.value > 0 for figure in figures.values())
    assert figures["source_0.1_step_0.2.stall"].at_most == 1.05
    assert figures["source_0.1_step_0.2.synchronous_ms"].value >= 0.3
