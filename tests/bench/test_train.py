"""Tests of the cases of `bench train` and of their figures, without starting processes."""

from __future__ import annotations

import json

import pytest

from meshwright.cluster.hardware import Rate
from meshwright.cluster.presets import device_for
from meshwright.config.facts_for_family import model_facts
from meshwright_bench import devices
from meshwright_bench.alternate import Alternation
from meshwright_bench.benchmarks import DeviceChoice, Options
from meshwright_bench.report import as_json
from meshwright_bench.train import benchmark
from meshwright_bench.train.benchmark import CaseResult, bench_train, case_figures, unmeasured_figures
from meshwright_bench.train.cases import cpu_cases, cuda_cases

GPU = "NVIDIA H200"


def measured(*, device=None) -> CaseResult:
    memory = dict.fromkeys(("ours", "bare"), None if device is None else 2**35)
    return CaseResult(Alternation({"ours": (0.5, 0.5), "bare": (0.25, 0.75)}), memory, device)


def by_name(figures):
    assert len({figure.name for figure in figures}) == len(figures)
    return {figure.name.partition(".")[2]: figure for figure in figures}


def test_the_cases_match_the_documentation():
    one, two = cpu_cases()
    assert (one.config.mesh.axes().num_ranks(), two.config.mesh.axes().num_ranks()) == (1, 2)
    assert all(case.at_least == 0.97 and case.config.name == "llama-tiny" for case in (one, two))
    for case in cuda_cases():
        assert 0.9e9 < model_facts(case.config).num_params() < 1.3e9
        assert case.config.train.precision == "bfloat16"
        assert case.at_least == 0.98
        needed = case.config.train.global_batch * case.config.train.seq_len * case.num_steps
        assert case.random_tokens > needed, "no batch is seen twice"
    assert [case.config.train.compile for case in cuda_cases()] == [False, True]


def test_a_step_faster_than_bare_is_a_ratio_over_one():
    case = cpu_cases()[0]
    figures = by_name(case_figures(case, measured()))
    assert figures["ratio"].value == pytest.approx((0.5 + 1.5) / 2)
    assert figures["ratio"].spread == pytest.approx((0.5, 1.5))
    assert figures["ratio"].at_least == case.at_least
    assert figures["ours_tokens_per_s"].value == pytest.approx(case.tokens_per_step / 0.5)
    assert figures["bare_step_ms"].value == pytest.approx(500)
    assert "ours_mfu" not in figures


def test_on_cuda_there_are_mfu_and_memory():
    case = cuda_cases()[0]
    figures = by_name(case_figures(case, measured(device=GPU)))
    flops = model_facts(case.config).flops_per_token * case.tokens_per_step / 0.5
    assert figures["ours_mfu"].value == pytest.approx(flops / device_for(GPU).peak(Rate.BF16))
    assert figures["bare_memory"].value == 2**35


def test_an_unknown_gpu_has_no_mfu_and_the_figure_says_why():
    figures = by_name(case_figures(cuda_cases()[0], measured(device="NVIDIA X1")))
    assert figures["ours_mfu"].value is None
    assert "NVIDIA X1" in figures["ours_mfu"].note
    assert figures["ratio"].value is not None


def fake_launch(answer):
    def launch(body, argument, **options):
        argument.write_text(json.dumps(answer), "utf-8")

    return launch


def test_on_a_cpu_the_cuda_figures_are_listed_as_unmeasured(monkeypatch):
    monkeypatch.setattr(devices, "launch", fake_launch(None))
    monkeypatch.setattr(benchmark, "run_case", lambda case: measured())
    said = []
    report = bench_train(Options(rounds=1), said.append)
    figures = as_json(report)["figures"]
    assert figures["one_process.ratio"] is not None and figures["fsdp2_two_processes.ratio"] is not None
    for case in cuda_cases():
        assert all(figures[figure.name] is None for figure in unmeasured_figures(case))
    assert len(report.notes) == 2
    assert all("; 8 steps per arm, against" in note for note in report.notes), "two blocks of 4 steps in one round"
    assert said


@pytest.mark.parametrize("choice", [DeviceChoice.AUTO, DeviceChoice.CUDA])
def test_with_a_gpu_the_cuda_cases_are_measured(monkeypatch, choice):
    monkeypatch.setattr(devices, "launch", fake_launch(GPU))
    monkeypatch.setattr(benchmark, "run_case", lambda case: measured(device=GPU))
    report = bench_train(Options(choice), lambda text: None)
    assert report.device.startswith(GPU)
    assert {figure.name.partition(".")[0] for figure in report.figures} == {case.name for case in cuda_cases()}
    assert all(figure.value is not None for figure in report.figures)
