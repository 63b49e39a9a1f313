"""Rates scaled to runs: those of a cluster that made the runs are found again, whatever the scaled one had."""

from __future__ import annotations

import math

import pytest
from typer.testing import CliRunner

from meshwright.calibrate.from_runs import factors, recalibrated
from meshwright.cli.main import app
from meshwright.cluster.performance import HostCosts
from meshwright.cluster.presets import find_cluster
from meshwright.errors import MeshwrightError
from meshwright.plan.time.step_time import predict_step
from meshwright.train.record.step_parts import StepParts
from meshwright.train.report.comparison import COMPUTE, MeasuredRun
from meshwright.train.report.run_data import read_run
from tests.plan.plans import plan_of
from tests.plan.time.constant_rates import constant_rates
from tests.train.report.folders import write_folder

HOST = HostCosts(launch_us=2.0, compiled_launch_us=1.0, block_us=20.0, parameter_us=50.0, step_us=1e6)
WORDS = ("llama-tiny mesh.dp_shard=2", "llama-tiny mesh.tp=2", "llama-tiny mesh.dp_shard=2 mesh.tp=2")
TIMES = {"compute": 3.0, "communication": 0.5, "optimizer": 2.0, "other": 1.5}
ALONE = {"optimizer": "optimizer", "step": "other"}


def cluster(*, is_async=False):
    return constant_rates(host=HOST, is_async=is_async, residual=0.2)


def made(words, base, *, noise=1.0, times=TIMES):
    """A run that took other times than predicted, by part."""
    parts = dict.fromkeys(("compute", "data", "communication", "bubble", "optimizer", "core", "other"), 0.0)
    for name, us in predict_step(plan_of(words), base).parts.items():
        part = "compute" if name in COMPUTE else ALONE.get(name, "communication")
        parts[part] += noise * times[part] * us / 1e6
    return MeasuredRun(plan_of(words), "cpu", captured=False, ranks=[StepParts(**parts)] * 2, memory=[])


def test_the_factors_of_a_run_are_found():
    found = factors(cluster(), [made(words, cluster()) for words in WORDS])
    means = {name: one.mean for name, one in found.items()}
    assert means == pytest.approx({
        "forward and backward": 3.0, "exposed communication": 0.5, "optimizer": 2.0, "data and other": 1.5,
    })  # fmt: skip
    assert all(one.deviation == pytest.approx(0.0, abs=1e-6) for one in found.values())


def test_a_scaled_cluster_predicts_the_runs():
    """Their parts too, but for the update's own bytes, which take part in the rate of the memory."""
    runs = [made(words, cluster()) for words in WORDS]
    scaled = recalibrated(cluster(), factors(cluster(), runs), source="a test")
    for words, run in zip(WORDS, runs, strict=True):
        time = predict_step(plan_of(words), scaled)
        assert time.total / 1e6 == pytest.approx(run.ranks[0].total(), rel=0.02)
    assert scaled.performance.source == "a test"


def test_on_a_gpu_computation_and_communication_have_one_factor():
    """Communication inside blocks is measured with them."""
    times = {"compute": 2.0, "communication": 2.0, "optimizer": 1.0, "other": 1.0}
    base = cluster(is_async=True)
    found = factors(base, [made(words, base, times=times) for words in WORDS])
    assert found["computation and communication"].mean == pytest.approx(2.0)
    scaled = recalibrated(base, found, source="a test")
    assert scaled.performance.products["float32"].flops_per_s == base.performance.products["float32"].flops_per_s / 2
    assert scaled.performance.links["inside_node"].efficiency == 0.5


def test_what_differs_between_runs_is_the_residual():
    runs = [made(WORDS[0], cluster(), noise=math.exp(sign * 0.3)) for sign in (-1, 1)]
    found = factors(cluster(), runs)
    assert found["forward and backward"].deviation == pytest.approx(0.3)
    scaled = recalibrated(cluster(), found, source="a test").performance
    assert scaled.products["float32"].residual == scaled.memory_residual == pytest.approx(0.3)
    one = recalibrated(cluster(), factors(cluster(), runs[:1]), source="a test").performance
    assert one.products["float32"].residual == 0.2  # of one run nothing new is known


def test_more_than_the_peak_raises_the_peak():
    faster = factors(cluster(), [made(WORDS[0], cluster(), noise=0.5, times=dict.fromkeys(TIMES, 1.0))])
    scaled = recalibrated(cluster(), faster, source="a test")
    assert scaled.performance.memory_efficiency == scaled.performance.links["inside_node"].efficiency == 1.0
    assert scaled.device.memory_bandwidth_bytes_per_s == 2 * cluster().device.memory_bandwidth_bytes_per_s
    assert scaled.inside_node.bandwidth_bytes_per_s == 2 * cluster().inside_node.bandwidth_bytes_per_s


def test_the_command_writes_a_cluster_that_predicts_the_run(tmp_path):
    folder, out = write_folder(tmp_path / "run", WORDS[0].split()), tmp_path / "scaled.toml"
    words = ["calibrate", "--from", str(folder), "-o", str(out)]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    run = MeasuredRun.of(read_run(folder))
    found = (factors(find_cluster(name), [run])["forward and backward"].mean for name in ("CPU", str(out)))
    before, after = map(math.log, found)
    assert abs(after) < 0.01 < abs(before)


@pytest.mark.parametrize("fault", ["devices", "unknown", "not measured"])
def test_runs_that_tell_nothing_are_errors(tmp_path, fault):
    folders = [write_folder(tmp_path / name, WORDS[0].split(), measured=fault != "not measured") for name in ("a", "b")]
    if fault != "not measured":
        changed = folders[1:] if fault == "devices" else folders
        for folder in changed:
            events = (folder / "events.jsonl").read_text().replace('"device": "cpu"', '"device": "NVIDIA of 2040"')
            (folder / "events.jsonl").write_text(events)
    words = ["calibrate", *(word for folder in folders for word in ("--from", str(folder))), "-o", str(tmp_path / "c")]
    with pytest.raises(MeshwrightError) as caught:
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert caught.value.rule and caught.value.fix
