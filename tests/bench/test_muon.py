"""Tests of `bench muon`: both sides make the same update, and a side that doesn't is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.errors import RunError
from meshwright_bench.muon import measure
from meshwright_bench.muon.benchmark import step_figures, update_figures
from meshwright_bench.muon.cases import UpdateTask
from tests.bench.tiny import by_name
from tests.gangs.gang import GangError

TASK = UpdateTask(Path(), size=12, num_matrices=4, rounds=1, steps=1)


def measured(rank, world_size, damage=False):
    real = measure.update_everywhere
    if damage:
        measure.update_everywhere = lambda slots, rank, num_ranks: real(slots[:-1], rank, num_ranks)
    try:
        return measure.both_sides(TASK, rank, world_size)
    finally:
        measure.update_everywhere = real


def test_both_sides_update_alike_and_bytes_are_those_of_the_moves(gang):
    answer = gang(4).run(measured)[0]
    shard = 4 * 12 * 3
    # An owner gets three shards and returns three; each rank owns one matrix of four.
    assert answer["bytes"] == {"owners": 6 * shard, "everywhere": 4 * 3 * shard}
    figures = by_name(update_figures(answer))
    assert figures["update.speedup"].at_least == 1.5 and figures["update.owners_ms"].value > 0


def test_another_update_is_an_error(gang):
    with pytest.raises(GangError) as caught:
        gang(2).run(measured, True)
    assert isinstance(caught.value.exception, RunError) and "differ" in caught.value.exception.what


def test_steps_are_compared_in_rounds():
    figures = {one.name: one for one in step_figures({"seconds": {"adamw": [0.1, 0.2], "muon": [0.2, 0.4]}})}
    assert figures["step.muon_over_adamw"].value == 2.0
