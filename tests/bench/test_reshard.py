"""Tests of `bench reshard`: both sides are measured on the same tensors, and the slowest pair is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.device_mesh import init_device_mesh

from meshwright_bench.alternate import Alternation
from meshwright_bench.ranks import run_measurement
from meshwright_bench.reshard import benchmark, cases
from meshwright_bench.reshard.benchmark import bytes_body, bytes_figures, planning_figures, time_figures
from meshwright_bench.reshard.sides import slowest, time_pair
from tests.bench.tiny import by_name

FEW = (("S0 S1", "S1 S0"), ("P R", "R R"), ("R R", "S0 R"))


def timed(rank, world_size):
    task = cases.RedistributeTask(Path("nowhere"), (2, 2), 8, rounds=2, block_s=1e-3)
    mesh = init_device_mesh("cpu", task.axis_sizes)
    return {" → ".join(pair): time_pair(mesh, *pair, task, task.rounds).seconds for pair in FEW}


def test_both_sides_are_timed_on_pairs(gang):
    for answer in gang(4).run(timed):
        assert all(set(sides) == {cases.OURS, cases.TORCH} and len(sides[cases.OURS]) == 2 for sides in answer.values())


def test_the_slowest_pair_is_named():
    answer = {
        "S0 S1 → S1 S0": {cases.OURS: [1.0, 1.0], cases.TORCH: [3.0, 3.0]},
        "R R → S0 R": {cases.OURS: [1.0, 1.0], cases.TORCH: [0.5, 0.5]},
        "S0 R → R R": {cases.OURS: [1.0, 1.0], cases.TORCH: [1.0, 1.0]},
    }
    figures, slowest = time_figures("4", answer)
    found = by_name(figures)
    assert slowest == "R R → S0 R"
    assert found["4.slowest_speedup"].value == 0.5
    assert found["4.slowest_speedup"].is_met is False
    assert found["4.median_speedup"].value == 1
    assert found["4.S0_S1.S1_S0.speedup"].is_met


def test_slowest_returns_the_pairs_to_measure_again():
    ours = {("a", "b"): 1.0, ("c", "d"): 4.0, ("e", "f"): 2.0}
    timed = {pair: Alternation({cases.OURS: (seconds,), cases.TORCH: (2.0,)}) for pair, seconds in ours.items()}
    assert slowest(timed, 2) == [("c", "d"), ("e", "f")]


def test_pairs_are_supported_by_both_sides():
    assert len(set(cases.PAIRS)) == len(cases.PAIRS) == 16 * 9 - 9
    assert ("S0 S1", "S1 S0") in cases.PAIRS


def test_planning_is_timed_cold_and_cached(monkeypatch):
    monkeypatch.setattr(benchmark, "NUM_SAMPLES", 3)
    assert [figure.name for figure in planning_figures(2)] == ["planning.2_axes.cold", "planning.2_axes.cached"]


@pytest.mark.slow
def test_bytes_of_pytorchs_planners_are_counted_from_their_collectives():
    answer = run_measurement(bytes_body, cases.BytesTask, num_ranks=1)
    found = {figure.name: figure.value for figure in bytes_figures(answer)}
    local = 8192 * 8192 * 2 // 32
    assert answer["4x8.S0_S1.S1_S0"][cases.GREEDY] == 13 * local
    assert found["bytes.4x8.R_S0.S0_R.greedy"] == 7 * 2 * 8192 * 8192 // 8
    assert answer["4x8.S0@1_S0@0.S0_S0"][cases.GREEDY] is None
    assert all(answer[row.name()][cases.DIJKSTRA] for row in cases.LAYOUT_PAIRS)
    assert all(
        found[f"bytes.{row.name()}.ours"] >= found[f"bytes.{row.name()}.lower_bound"] > 0 for row in cases.LAYOUT_PAIRS
    )
