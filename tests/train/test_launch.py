"""The launcher with bodies that do nothing but fail: who is named, who is ended, and how soon."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from meshwright.errors import ConfigError, InputError, RunError
from meshwright.train.context import RankContext
from meshwright.train.launch import launch
from tests.train.runs import LIMIT_S, is_alive


def misbehave(context: RankContext, argument):
    """What `argument` has for this rank, or waiting for ever."""
    folder, actions = argument
    (folder / f"pid-{context.rank}").write_text(str(os.getpid()))
    action = actions.get(context.rank, "wait")
    while len(list(folder.glob("pid-*"))) < context.num_ranks:
        time.sleep(0.01)
    context.post("step", 7)
    if action == "well":
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if action == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if action == "exit":
        os._exit(7)
    if action == "bug":
        time.sleep(0.1)
        raise ValueError("a bug")
    if action == "lost":
        raise RuntimeError("[gloo] Connection closed by peer")
    if action == "input":
        raise ConfigError("bad", where="here", rule="none", fix="other")
    if action == "until stopped":
        while not context.board.stop_requested():
            time.sleep(0.01)
        context.post("saving", 8)
        return
    time.sleep(600)


def run(folder, *, num_ranks=2, on_interrupt=lambda: None, **actions):
    """Launch, and check that whatever came of it no rank is left."""
    by_rank = {int(name[1:]): action for name, action in actions.items()}
    started = time.monotonic()
    try:
        launch(misbehave, (folder, by_rank), num_ranks=num_ranks, threads=1, on_interrupt=on_interrupt)
    finally:
        left = [path.name for path in folder.glob("pid-*") if is_alive(int(path.read_text()))]
        assert not left and time.monotonic() - started < 60


def test_all_well(tmp_path):
    run(tmp_path, num_ranks=3, r0="well", r1="well", r2="well")
    assert len(list(tmp_path.glob("pid-*"))) == 3


@pytest.mark.parametrize(("action", "what"), [
    ("kill", "rank 1 was killed by SIGKILL in step 7; the other ranks were ended"),
    ("segfault", "rank 1 was killed by SIGSEGV in step 7"),
    ("exit", "rank 1 exited with code 7 in step 7"),
    ("bug", "rank 1 failed in step 7\nTraceback"),
])  # fmt: skip
def test_ranks_that_notice_nothing_are_ended(tmp_path, action, what):
    """The other one sleeps: it would never learn of it."""
    started = time.monotonic()
    with pytest.raises(RunError) as caught:
        run(tmp_path, r1=action)
    assert caught.value.what.startswith(what) and time.monotonic() - started < LIMIT_S + 5
    assert caught.value.where.startswith("rank 1 of 2, step 7, host ")


@pytest.mark.parametrize("cause", ["kill", *(pytest.param(c, marks=pytest.mark.slow) for c in ("exit", "bug"))])
def test_the_cause_is_named_not_those_who_lost_it(tmp_path, cause):
    with pytest.raises(RunError, match="^rank 2 ") as caught:
        run(tmp_path, num_ranks=3, r0="lost", r1="lost", r2=cause)
    assert "closed by peer" not in caught.value.what


def test_bad_input_found_by_a_rank_stays_bad_input(tmp_path):
    with pytest.raises(InputError) as caught:
        run(tmp_path, r0="input", r1="input")
    error = caught.value
    assert (error.what, error.where, error.rule, error.fix) == ("bad", "here", "none", "other")


def interrupt_after(seconds, number=signal.SIGINT):
    threading.Timer(seconds, os.kill, (os.getpid(), number)).start()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_all_ranks_to_stop(tmp_path, number):
    heard = []
    interrupt_after(0.7, number)
    run(tmp_path, r0="until stopped", r1="until stopped", on_interrupt=lambda: heard.append(1))
    assert heard == [1]


def test_a_second_signal_ends_them(tmp_path):
    interrupt_after(0.7), interrupt_after(1.2)
    with pytest.raises(RunError, match="ended by a second interrupt") as caught:
        run(tmp_path)
    assert caught.value.fix


def test_where_nobody_is_told_the_first_signal_ends_them(tmp_path):
    interrupt_after(0.7)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, on_interrupt=None)


def test_handlers_are_put_back(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run(tmp_path, num_ranks=1, r0="well")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.slow
def test_a_rank_that_is_stopped_when_the_others_have_ended(tmp_path, monkeypatch):
    """Nobody waits for it in a collective, so no time runs out."""
    monkeypatch.setattr("meshwright.train.launch.STOPPED_S", 2.0)
    with pytest.raises(RunError, match="^rank 1 was stopped .* in step 7; the others had ended") as caught:
        run(tmp_path, num_ranks=3, r0="well", r1="stop", r2="well")
    assert caught.value.where.startswith("rank 1 of 3, step 7") and caught.value.fix
