"""The launcher with bodies that do nothing but fail: who is named, who is ended, and how soon."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from meshwright.errors import ConfigError, InputError, RunError
from meshwright.train.launch.launcher import launch, shrunken_files
from meshwright.train.launch.rank_context import RankContext
from tests.helpers import clean_environment
from tests.train.runs import is_alive, wait_until

WAIT_S = 120.0
"""Longer than anything here takes, on a loaded machine too."""


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
    if action == "kill server":
        os.kill(os.getppid(), signal.SIGKILL)
    if action.startswith("read "):
        context.post("step", 8)
        with open(action.removeprefix("read "), "r+b") as file:
            mapped = np.memmap(file.name, dtype=np.uint8, mode="r")
            file.truncate(100)
        mapped.sum()
    if action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if action == "segfault":
        faulthandler.disable()  # its dump would stand among the results
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
    if action.startswith("deaf to "):
        os.kill(os.getpid(), int(action.removeprefix("deaf to ")))
        return
    if action in SIGNALS:
        signal_launcher(context, SIGNALS[action])
        context.post("saving", 8)
        return
    if action == "until stopped":
        wait_until(context.board.stop_requested, timeout_s=WAIT_S)
        return
    time.sleep(WAIT_S)
    (folder / f"woke-{context.rank}").touch()


SIGNALS = {
    "interrupt": [signal.SIGINT],
    "terminate": [signal.SIGTERM],
    "interrupt twice": [signal.SIGINT, signal.SIGINT],
}
"""What a rank sends to the launcher, which by then has its handlers: a timer could be too early for them."""


def signal_launcher(context, numbers):
    """The first signal, and each other when the one before was acted on."""
    for number in numbers:
        os.kill(multiprocessing.parent_process().pid, number)
        wait_until(context.board.stop_requested, timeout_s=WAIT_S)
    if len(numbers) > 1:
        time.sleep(0.5)  # time to be ended in


def run(folder, *, num_ranks=2, on_interrupt=lambda: None, **actions):
    """Launch, and check that whatever came of it no rank is left, and that none was waited for to the end."""
    by_rank = {int(name[1:]): action for name, action in actions.items()}
    try:
        launch(misbehave, (folder, by_rank), num_ranks=num_ranks, threads=1, on_interrupt=on_interrupt)
    finally:
        pids = [int(path.read_text()) for path in folder.glob("pid-*")]
        wait_until(lambda: not any(map(is_alive, pids)))
        assert not list(folder.glob("woke-*"))


def test_all_well(tmp_path):
    run(tmp_path, num_ranks=3, r0="well", r1="well", r2="well")
    assert len(list(tmp_path.glob("pid-*"))) == 3


@pytest.mark.parametrize(("action", "what"), [
    ("kill", "rank 1 was killed by SIGKILL in step 7; the other ranks were killed"),
    ("segfault", "rank 1 was killed by SIGSEGV in step 7"),
    ("exit", "rank 1 exited with code 7 in step 7"),
    ("bug", "rank 1 failed in step 7\nTraceback"),
])  # fmt: skip
def test_ranks_that_notice_nothing_are_ended(tmp_path, action, what):
    """The other one sleeps: it would never learn of it."""
    with pytest.raises(RunError) as caught:
        run(tmp_path, r1=action)
    assert caught.value.what.startswith(what)
    assert caught.value.where.startswith("rank 1 of 2, step 7, host ")
    assert "meshwright run" not in caught.value.fix, "nothing says that these ranks are a run's"


@pytest.mark.parametrize("cause", ["kill", *(pytest.param(c, marks=pytest.mark.slow) for c in ("exit", "bug"))])
def test_the_cause_is_named_not_those_who_lost_it(tmp_path, cause, monkeypatch):
    monkeypatch.setattr("meshwright.train.launch.launcher.GRACE_S", WAIT_S)  # on a loaded machine they end far apart
    with pytest.raises(RunError, match="^rank 2 ") as caught:
        run(tmp_path, num_ranks=3, r0="lost", r1="lost", r2=cause)
    assert "closed by peer" not in caught.value.what


def test_bad_input_found_by_a_rank_stays_bad_input(tmp_path):
    with pytest.raises(InputError) as caught:
        run(tmp_path, r0="input", r1="input")
    error = caught.value
    assert (error.what, error.where, error.rule, error.fix) == ("bad", "here", "none", "other")


@pytest.mark.parametrize("action", ["interrupt", "terminate"])
def test_a_signal_asks_all_ranks_to_stop(tmp_path, action):
    heard = []
    run(tmp_path, r0="until stopped", r1=action, on_interrupt=lambda: heard.append(1))
    assert heard == [1]


def test_a_second_signal_ends_them(tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.train.launch.launcher.SAME_S", 0.0)
    with pytest.raises(RunError, match="killed by a second interrupt") as caught:
        run(tmp_path, r0="interrupt twice")
    assert caught.value.fix


def test_signals_close_together_are_one_wish(tmp_path, monkeypatch):
    """`timeout` signals its command, and then the whole group, the command in it."""
    monkeypatch.setattr("meshwright.train.launch.launcher.SAME_S", WAIT_S)
    heard = []
    run(tmp_path, r0="until stopped", r1="interrupt twice", on_interrupt=lambda: heard.append(1))
    assert heard == [1]


def test_where_nobody_is_told_the_first_signal_ends_them(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, r0="interrupt", on_interrupt=None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_rank_does_not_end_of_what_stops_a_run(tmp_path, number):
    """The launcher asks it through the board: ended at once, it could not save."""
    run(tmp_path, num_ranks=1, r0=f"deaf to {number}")


def test_nor_does_the_process_that_ranks_are_forked_from():
    done = subprocess.run([sys.executable, "-c", FORK_AFTER_SIGNALS], capture_output=True, text=True,
                          env=clean_environment(), start_new_session=True)  # fmt: skip
    assert done.stdout == "forked\n", done.stderr


FORK_AFTER_SIGNALS = """
import multiprocessing, os, signal
from multiprocessing import forkserver
from meshwright.train.launch import launcher

methods = multiprocessing.get_context("forkserver")
methods.set_forkserver_preload([])  # the server is up in no time, and signals find it amid its start or after
for number in launcher.STOPPING:
    signal.signal(number, lambda number, frame: None)
with launcher._starting():
    forkserver.ensure_running()
server = forkserver._forkserver._forkserver_pid
for number in launcher.STOPPING:
    os.killpg(0, number)
process = methods.Process(target=print, args=("forked",))
process.start()
process.join()
assert forkserver._forkserver._forkserver_pid == server, "another server had to be started"
"""


def test_handlers_are_put_back(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run(tmp_path, num_ranks=1, r0="well")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.slow
def test_a_rank_that_is_stopped_when_the_others_have_ended(tmp_path, monkeypatch):
    """Nobody waits for it in a collective, so no time runs out."""
    monkeypatch.setattr("meshwright.train.launch.launcher.STOPPED_S", 2.0)
    with pytest.raises(RunError, match="^rank 1 was stopped .* in step 7; the other ranks had ended") as caught:
        run(tmp_path, num_ranks=3, r0="well", r1="stop", r2="well")
    assert caught.value.where.startswith("rank 1 of 3, step 7") and caught.value.fix


LAUNCH = """
import importlib, sys
from meshwright.errors import RunError
from meshwright.train.launch import launcher

if __name__ == "__main__":
    launcher.PRELOAD = {preload}
    body = getattr(importlib.import_module("{module}"), "{name}")
    try:
        launcher.launch(body, None, num_ranks={num_ranks}, threads=1)
    except RunError as error:
        sys.exit(f"{{error.what}} | {{error.fix}}")
"""


def launched(folder, *, preload, body, num_ranks=2):
    """Stderr of a program that launches a body, `module:name`; modules are found in the folder."""
    module, _, name = body.partition(":")
    (folder / "main.py").write_text(LAUNCH.format(preload=preload, module=module, name=name, num_ranks=num_ranks))
    path = os.pathsep.join([str(folder), *sys.path])
    command = [sys.executable, str(folder / "main.py")]
    env = clean_environment() | {"PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=WAIT_S).stderr


@pytest.mark.slow
def test_a_server_that_is_killed_at_startup_is_named(tmp_path):
    """As when memory runs out while it imports torch."""
    (tmp_path / "module_that_dies.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    shown = launched(tmp_path, preload=["module_that_dies"], body="builtins:print")
    assert "the server process that ranks are forked from died before all ranks had started" in shown
    assert "ran out of memory" in shown


LEAVES_A_LOCK = """
import multiprocessing
from meshwright.errors import RunError

locks = []

def leave(context, argument):
    locks.append(multiprocessing.Lock())
    raise RunError("stopped")
"""


@pytest.mark.slow
def test_a_rank_that_ends_early_leaves_no_semaphores(tmp_path):
    """As `torch.compile` would, whose progress bar has a lock: Python's resource tracker would warn of them.

    One rank: another one may be killed, for the first one's end, before it has released its own.
    """
    (tmp_path / "leaves_a_lock.py").write_text(LEAVES_A_LOCK)
    assert launched(tmp_path, preload=[], body="leaves_a_lock:leave", num_ranks=1) == "stopped | \n"


@pytest.mark.slow
def test_a_server_that_is_killed_later_is_named(tmp_path):
    """Its ranks are killed with it, and nobody is left who knows how they ended."""
    with pytest.raises(RunError, match="forked from died with rank . in step 7") as error:
        launch(misbehave, (tmp_path, {0: "kill server"}), num_ranks=2, threads=1)
    assert "ran out of memory" in error.value.fix and "meshwright run" not in error.value.fix
    launch(misbehave, (tmp_path, {0: "well", 1: "well"}), num_ranks=2, threads=1)


def test_a_mapped_file_that_shrinks_is_named_without_a_dump(tmp_path, capfd):
    path = tmp_path / "tokens.bin"
    path.write_bytes(bytes(100_000))
    kept = np.memmap(path, dtype=np.uint8, mode="r")  # as a run's launcher has
    assert not shrunken_files()
    with pytest.raises(RunError, match=f"killed by SIGBUS in step 8.*{path} is shorter than when the run") as error:
        launch(misbehave, (tmp_path, {0: f"read {path}"}), num_ranks=2, threads=1)
    assert "restore the file" in error.value.fix and len(kept)
    assert "Fatal Python error" not in capfd.readouterr().err
