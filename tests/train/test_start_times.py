"""Times of a start: phase by phase, on every rank, and recorded once the first step has ended."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import pytest
import torch

from meshwright.parallel.apply_plan import compile_seconds
from meshwright.plan.rules import load
from meshwright.train import training_loop
from meshwright.train.launch.rank_context import (
    FIRST_STEP,
    MODEL,
    PLAN,
    VALUES,
    RankContext,
    RunSpec,
    StartTimes,
    StatusBoard,
)
from meshwright.train.rank_run import run_rank
from meshwright.train.record.record_files import read_events
from meshwright.train.record.reporter import Reporter
from meshwright.train.train_step import TrainStep
from tests.helpers import small_corpus
from tests.train.runs import STEPS, choose


def test_a_phase_begins_where_the_last_one_ended(monkeypatch):
    now = iter([100.0, 101.0, 103.0, 107.0, 115.0])
    monkeypatch.setattr("meshwright.train.launch.rank_context.time", SimpleNamespace(monotonic=lambda: next(now)))
    times = StartTimes()
    for phase in (PLAN, MODEL, VALUES, MODEL):
        times.end(phase)
    assert times.seconds == {PLAN: 1.0, MODEL: 10.0, VALUES: 4.0}
    times.move(0.5, out_of=MODEL, to=FIRST_STEP)
    assert times.seconds == {PLAN: 1.0, MODEL: 9.5, VALUES: 4.0, FIRST_STEP: 0.5}


def begin(folder, words, *, resume=None):
    """Run in this process, and return what it recorded of its starts, with how long this one took at most."""
    started = time.monotonic()
    board = StatusBoard([0] * StatusBoard.length(1))
    run_rank(
        RankContext(0, 1, 0, 1, None, board),
        RunSpec(load(None, [*STEPS, *words]), Reporter, folder=choose(words, out=folder, resume=resume)),
    )
    seconds = time.monotonic() - started
    return [event["ranks"] for event in read_events(folder) if event["event"] == "under way"], seconds


def test_every_attempt_records_its_start(tmp_path, monkeypatch):
    steps = []

    def noted(self, step, call=TrainStep.__call__):
        time.sleep(0.3 if step == 1 else 0.0)
        steps.append(step)
        return call(self, step)

    monkeypatch.setattr(TrainStep, "__call__", noted)
    monkeypatch.setattr(training_loop, "compile_seconds", lambda: 1.0)  # of other tests in this process
    words = [*small_corpus(tmp_path), "checkpoint.every=2", "train.steps=2", "train.warmup_steps=0"]
    [[first]], seconds = begin(tmp_path / "run", words)
    assert list(first) == ["processes and imports", "process group", "data", "model", "initial values", "first step"]
    assert first["first step"] >= 0.3 and sum(first.values()) <= seconds
    starts, _ = begin(tmp_path / "run", [*words, "train.steps=4"], resume="auto")
    assert starts[0] == [first] and "checkpoint" in starts[1][0] and steps == [1, 2, 3, 4]
    starts, _ = begin(tmp_path / "run", [*words, "train.steps=4"], resume="auto")
    assert len(starts) == 2  # nothing was left to train


def test_compiling_is_timed():
    before = compile_seconds()
    torch.compile(lambda x: x.sin() + 1, backend="eager")(torch.ones(3))
    assert compile_seconds() > before
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "torch._dynamo.utils")
        assert compile_seconds() == 0.0
