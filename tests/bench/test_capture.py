"""Tests of `bench capture`: its arms compute the same, and its figures compare memory and speed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright_bench.capture.benchmark import capture_figures
from meshwright_bench.capture.cases import CALLABLES, EAGER, ON_CPU, ON_CUDA, PER_MICROBATCH, SLOT, CaptureTask
from meshwright_bench.capture.measure import measure_case
from meshwright_bench.capture.rank_order import RankOrder
from tests.bench.tiny import by_name

CPU = torch.device("cpu")
EXPERTS, PIPELINE = (replace(case, num_layers=2, seq_len=16) for case in ON_CPU[1:])
PIPELINE = replace(PIPELINE, stages=2, microbatches=8)


@pytest.mark.parametrize("case", [EXPERTS, pytest.param(PIPELINE, marks=pytest.mark.slow)], ids=lambda case: case.name)
def test_all_arms_compute_the_same(case):
    arms = {mode: RankOrder(case, CPU) for mode in (EAGER, SLOT, PER_MICROBATCH)}
    for mode in (SLOT, PER_MICROBATCH):
        arms[mode].capture(case.scope, mode)
    for _ in range(2):
        gradients = {}
        for mode, arm in arms.items():
            arm.step()
            gradients[mode] = [parameter.grad for parameter in arm.blocks.parameters()]
        for mode in (SLOT, PER_MICROBATCH):
            assert all(map(torch.equal, gradients[mode], gradients[EAGER]))
    num_modules = len(case.scope) * case.num_layers
    assert arms[SLOT].session.runner.stats().replays == 2 * num_modules * case.microbatches


@pytest.mark.slow
def test_figures_of_a_measurement():
    answer = measure_case(CaptureTask(Path(), PIPELINE, rounds=1, steps=1))
    figures = by_name(capture_figures(PIPELINE, answer, on_cuda=False))
    assert figures["pipeline.slot.graphs"].value == 2 * 2 * 2 and figures["pipeline.per_microbatch.graphs"].value == 32
    separate = figures["pipeline.slot_over_separate.pools"]
    assert separate.value == pytest.approx(0.25, rel=0.01) and separate.is_met


def test_speeds_are_compared_with_eager_execution_and_pytorchs_callables():
    seconds = {EAGER: [4.0, 4.0], SLOT: [2.0, 1.0], CALLABLES: [2.0, 2.0]}
    answer = {"graphs": {SLOT: 1, PER_MICROBATCH: 1}, "static": {SLOT: 1, PER_MICROBATCH: 1},
              "pools": {SLOT: 1, PER_MICROBATCH: 1, "separate": 1}, "capture_s": {SLOT: 1, PER_MICROBATCH: 1},
              "seconds": seconds}  # fmt: skip
    figures = by_name(capture_figures(ON_CUDA[0], answer, on_cuda=True))
    assert figures["launch-bound.slot_over_eager"].value == 3 and figures["launch-bound.slot_over_eager"].is_met
    assert figures["launch-bound.slot_over_pytorch"].value == 1.5
