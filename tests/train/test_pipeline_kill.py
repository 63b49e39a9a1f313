"""A rank of a pipelined run is killed or stands still: the run ends in time, and says which rank did what."""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from unittest import mock

import pytest

from meshwright.errors import CONTINUE, RunError
from meshwright.plan.make_plan import lowered_table, make_plan
from meshwright.plan.rules import load
from meshwright.train.launch.launcher import launch
from meshwright.train.launch.rank_context import RunSpec
from meshwright.train.record.reporter import Reporter
from tests.helpers import small_corpus
from tests.train.runs import LIMIT_S, STEPS, choose, is_alive, num_steps, rank_pids, start, wait_until
from tests.train.test_hang import PATIENCE_S, wait_no_longer_than

SUSPENDED_S = 20
"""How long others wait for a rank that is suspended within the step that they are in."""
ACTION = r"in step \d+, action \d+ \({stage}(F|B|SEND_F|SEND_B|RECV_F|RECV_B|FREE_IN|FREE_OUT|FREE_GRAD|FREE_IN_GRAD)\d"


@pytest.mark.slow
def test_a_lost_rank_is_named_with_its_action(tmp_path):
    words = [*STEPS, *small_corpus(tmp_path / "corpus"), "mesh.pp=2", "train.num_microbatches=4", "checkpoint.every=0",
             "train.validate_every=0", "train.steps=100000"]  # fmt: skip
    process = start(words, tmp_path / "run")
    wait_until(lambda: num_steps(tmp_path / "run") >= 3, timeout_s=LIMIT_S)
    pids = rank_pids(process.pid)
    os.kill(pids[1], signal.SIGKILL)
    _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1 and not any(map(is_alive, pids))
    assert stderr.startswith("error  rank 1 was killed by SIGKILL") and "of micro-batch" in stderr
    assert re.search(ACTION.format(stage=1), stderr), stderr
    assert "meshwright run " in stderr


# A moment that the rank reaches by itself, so the same each time


SIDE_BY_SIDE = 4
PIPELINED = ["mesh.pp=2", "train.num_microbatches=4"]


@dataclass(frozen=True)
class Moment:
    """Where a rank signals itself: at an action of its row in a step, or when it starts a phase."""

    rank: int
    action: str = ""
    phase: str = "step"
    step: int = 3
    number: signal.Signals = signal.SIGSTOP


class SignallingBoard:
    """A board on which posting a moment raises its signal."""

    def __init__(self, board, moment, position, at):
        self._board, self._moment, self._position, self._at = board, moment, position, at
        self._now = ("", 0)

    def __getattr__(self, name):
        return getattr(self._board, name)

    def post(self, rank, phase, step):
        self._board.post(rank, phase, step)
        self._now = (phase, step)
        if self._position is None:
            self._act()

    def post_action(self, rank, position):
        self._board.post_action(rank, position)
        if position == self._position:
            self._act()

    def _act(self):
        if self._now == (self._moment.phase, self._moment.step):
            self._at.write_text(str(time.monotonic()))  # one clock for all processes
            os.kill(os.getpid(), self._moment.number)


class WaitingBoard:
    """A board of the other ranks, which from then on don't wait long for one that is suspended."""

    def __init__(self, board, moment, at):
        self._board, self._moment, self._at = board, moment, at

    def __getattr__(self, name):
        return getattr(self._board, name)

    def post(self, rank, phase, step):
        self._board.post(rank, phase, step)
        if (phase, step) == (self._moment.phase, self._moment.step):
            if not self._moment.action:
                wait_until(self._at.exists)
            wait_no_longer_than(SUSPENDED_S if self._moment.action else PATIENCE_S)


def row_of(config, rank):
    row = lowered_table(config).actions[config.mesh.axes().coordinate(rank)["pp"]]
    return [str(part) for action in row for part in action.parts()]


def signalling_body(context, argument):
    from meshwright.train.rank_run import run_rank

    spec, moment, folder = argument
    (folder / f"pid-{context.rank}").write_text(str(os.getpid()))
    if context.rank == moment.rank:
        position = row_of(spec.config, context.rank).index(moment.action) if moment.action else None
        context = replace(context, board=SignallingBoard(context.board, moment, position, folder / "at"))
    elif moment.number == signal.SIGSTOP:
        context = replace(context, board=WaitingBoard(context.board, moment, folder / "at"))
    context.post("starting")
    run_rank(context, spec)


def ended(words, out, moment):
    """The error of a run that the moment ends, in time and with no rank left."""
    config = load(None, [*STEPS, *words])
    spec = RunSpec(config, Reporter, folder=choose(words, out=out, resume=None))
    num_ranks, fork = config.mesh.axes().num_ranks(), get_context("fork")
    # Ranks are forked from this process, which has what they import.
    with mock.patch("multiprocessing.get_context", lambda method: fork), pytest.raises(RunError) as caught:
        launch(signalling_body, (spec, moment, out), num_ranks=num_ranks, threads=1, on_interrupt=lambda: None,
               describe_action=make_plan(config).describe_action)  # fmt: skip
    assert time.monotonic() - float((out / "at").read_text()) < LIMIT_S
    assert not any(is_alive(int(path.read_text())) for path in out.glob("pid-*"))
    assert caught.value.exit_code == 1 and CONTINUE in caught.value.fix
    return caught.value


def place_of(words, moment):
    config = load(None, [*STEPS, *words])
    position = row_of(config, moment.rank).index(moment.action)
    return f"in step {moment.step}, action {position + 1} ({make_plan(config).describe_action(moment.rank, position)})"


@pytest.mark.slow
def test_a_rank_stopped_at_an_action_is_named_with_it(corpus, endings):
    error, place = endings["forward"].result(), place_of([*corpus, *PIPELINED], MOMENTS["forward"][1])
    assert "(1F2: forward of micro-batch 2 on stage 1)" in place
    assert error.what == (
        f"rank 1 was stopped (SIGSTOP, or a debugger) {place}; rank 0 waited for it until the timeout, and all "
        "ranks were killed"
    )
    assert re.search(r"rank 0: step 3, action \d+ \(0\w+: .* of micro-batch \d on stage 0\)", error.where), error.where
    told = r"rank 0 timed out after [\d.]+ s in (send|receive), number \d+ in the group of ranks 0, 1, of float32 "
    assert re.search(told, error.where) and re.search(r"execute\.py:\d+ in ", error.where), error.where


@pytest.fixture(scope="module")
def endings(gang, corpus, tmp_path_factory):
    """What `ended` gives for every moment, by its name. Most of them wait for time-outs, so a few run side by side."""
    runs = MOMENTS | {name: ([], moment) for name, (moment, _) in PHASES.items()}
    runs["starting"][0].append(f"train.timeout_s={SUSPENDED_S}")
    with ProcessPoolExecutor(SIDE_BY_SIDE, get_context("forkserver")) as launchers:
        yield {
            name: launchers.submit(ended, [*corpus, *PIPELINED, *more], tmp_path_factory.mktemp("run"), moment)
            for name, (more, moment) in runs.items()
        }
        launchers.shutdown(cancel_futures=True)


FOUR = ["mesh.pp=4", "model.num_layers=4"]
MOMENTS = {
    "forward": ([], Moment(1, "1F2")),
    "receiving": (["pipeline.schedule=f-then-b"], Moment(0, "0RECV_B2@0")),
    "the last of four, killed": (FOUR, Moment(3, "3B0", number=signal.SIGKILL)),
    "put-off weights": (["pipeline.schedule=zb-h1"], Moment(1, "1W2")),
    "chunks, sharded": (["pipeline.schedule=zb-v", "model.num_layers=4", "mesh.dp_shard=2"], Moment(3, "2I1", step=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MOMENTS if name != "forward"])
def test_a_rank_that_goes_at_an_action(corpus, endings, name):
    more, moment = MOMENTS[name]
    words = [*corpus, *PIPELINED, *more]
    error = endings[name].result()
    how = "killed by SIGKILL" if moment.number == signal.SIGKILL else "stopped (SIGSTOP, or a debugger)"
    assert error.what.startswith(f"rank {moment.rank} was {how} {place_of(words, moment)}"), error.what


PHASES = {
    "starting": (Moment(1, phase="starting", step=0), "while starting;"),
    "validation": (Moment(1, phase="validating", step=4), "while validating (step 4);"),
    "save, the rank that commits": (Moment(0, phase="saving", step=2), "while saving (step 2);"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PHASES))
def test_a_rank_stopped_outside_of_an_action(endings, name):
    moment, place = PHASES[name]
    error = endings[name].result()
    assert error.what.startswith(f"rank {moment.rank} was stopped (SIGSTOP, or a debugger) {place}"), error.what


@pytest.mark.parametrize("said", [
    "Wait timeout", "Application timeout caused pair closure", "[gloo] Timed out waiting 4000ms for recv operation",
    "Connection closed by peer", "Socket Timeout",
])  # fmt: skip
def test_what_waiting_in_vain_says_is_no_cause_of_its_own(said):
    from meshwright.train.launch.local_worker import is_lost_peer

    assert is_lost_peer(RuntimeError(said)) and not is_lost_peer(ValueError(said))
