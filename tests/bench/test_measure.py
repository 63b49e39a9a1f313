"""Tests that both sides of every kind of case compute the same losses, and that different losses are an error."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from meshwright.errors import RunError
from meshwright_bench.train import measure, plain_loop
from meshwright_bench.train.benchmark import run_case
from meshwright_bench.train.measure import Arm, check_losses
from tests.bench.tiny import tiny_case
from tests.helpers import rank_context

CPU = torch.device("cpu")


def compare_body(rank, world_size, case):
    arms, timed = measure.compare(rank_context(rank, world_size), case, CPU)
    return {arm.name: (arm.losses, arm.done) for arm in arms}, dict(timed.seconds)


@pytest.mark.parametrize(
    "ranks, precision", [(1, "float32"), (1, "bfloat16"), pytest.param(2, "float32", marks=pytest.mark.slow)]
)
def test_both_sides_run_all_their_steps_on_the_same_losses(gang, ranks, precision):
    case = tiny_case(ranks=ranks, precision=precision)
    for sides, seconds in gang(ranks).run(compare_body, case):
        (ours, ours_done), (theirs, theirs_done) = sides["ours"], sides["bare"]
        assert ours == pytest.approx(theirs, abs=case.loss_tolerance)
        assert len(set(ours)) == case.warmup, "the model did not learn"
        assert ours_done == theirs_done == case.num_steps
        assert {name: len(values) for name, values in seconds.items()} == {"ours": case.rounds, "bare": case.rounds}
        assert all(value > 0 for values in seconds.values() for value in values)


class OtherBatches(plain_loop.BareBatches):
    def __getitem__(self, step):
        return super().__getitem__(step + 1)


right_rate = plain_loop.set_learning_rate
OTHERS = {
    "samples": (measure, "BareBatches", OtherBatches),
    "weights": (plain_loop, "initialize", lambda tensors, family, f: None),
    "rate": (plain_loop, "set_learning_rate", lambda optimizer, step, c: right_rate(optimizer, 2 * step, c)),
}


def other_body(rank, world_size, case, what):
    with mock.patch.object(*OTHERS[what]):
        measure.compare(rank_context(rank, world_size), case, CPU)


@pytest.mark.parametrize("what", OTHERS)
def test_sides_with_different_losses_are_rejected(gang, what):
    with pytest.raises(RunError, match="different losses"):
        gang(1).run(other_body, tiny_case(), what)


@pytest.mark.parametrize("own", [2.0002, float("nan"), float("inf")])
def test_different_or_non_finite_losses_are_rejected(own):
    case = replace(tiny_case(), warmup=1)
    arms = [Arm(name, lambda step: None, float, losses=[loss]) for name, loss in (("ours", own), ("bare", 2.0))]
    with pytest.raises(RunError) as caught:
        check_losses(case, arms)
    assert "tiny, step 1" in caught.value.where


def stop_body(rank, world_size, case):
    context = rank_context(rank, world_size)
    context.board.request_stop()
    measure.compare(context, case, CPU)


def test_a_stop_request_ends_the_measurement(gang):
    with pytest.raises(RunError, match="as requested"):
        gang(1).run(stop_body, tiny_case())


@pytest.mark.slow
def test_a_case_runs_in_processes_of_its_own():
    case = tiny_case(ranks=2)
    found = run_case(case)
    assert found.device is None
    assert len(found.timed.speedups("ours", over="bare")) == case.rounds


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("compile", [False, True])
def test_a_case_runs_on_cuda(compile):
    case = tiny_case(precision="bfloat16", compile=compile)
    train = case.config.train.model_copy(update={"device": "cuda"})
    found = run_case(replace(case, config=case.config.model_copy(update={"train": train})))
    assert found.device == torch.cuda.get_device_name(0)
    assert all(size is not None and size > 0 for size in found.memory_bytes.values())
