"""Calibration for real at a small budget: kinds and ranges only, since machines differ and are shared."""

from __future__ import annotations

import math

import pytest
import torch
from typer.testing import CliRunner

from meshwright.calibrate import measure, ranks
from meshwright.cli.main import app
from meshwright.cluster.presets import find_cluster


def test_times_of_ranks_are_their_mean(gang):
    assert gang(2).run(mean_of_ranks) == [1.5, 1.5]


def mean_of_ranks(rank, world_size):
    return ranks._mean(1.0 + rank, torch.device("cpu"))


@pytest.mark.slow
def test_this_machine(tmp_path):
    path = tmp_path / "cluster.toml"
    result = CliRunner().invoke(app, ["calibrate", "-o", str(path), "--device", "cpu", "--seconds", "2"])
    assert result.exit_code == 0, result.output
    cluster = find_cluster(str(path))
    performance = cluster.performance
    assert set(performance.products) == set(performance.attention) == {"float32", "bfloat16", "float64"}
    assert all(1e8 < curve.flops_per_s < 1e14 for curve in performance.products.values())
    assert all(0 < curve.residual < 2 for curve in performance.products.values())
    assert 0 < performance.memory_efficiency <= 1 and not performance.is_async and performance.cores >= 1
    assert 0.1 < performance.host.launch_us < 1e4 and performance.links["inside_node"].latency_us >= 0
    assert all(len(line) <= 80 for line in result.stdout.splitlines() if str(path) not in line)


def test_a_low_quantile_is_above_a_quarter_of_the_values():
    values = [float(value) for value in range(20, 0, -1)]
    assert [measure.low_quantile(values[-size:]) for size in (1, 9, 20)] == [1.0, 3.0, 6.0]


def test_every_case_is_timed_and_the_collector_is_on_again():
    found = measure.timed({"a": lambda: None, "b": lambda: sum(range(99))}, torch.device("cpu"), budget_s=0.0)
    assert set(found) == {"a", "b"} and all(0 < one < math.inf for one in found.values())
