"""The lock on a run folder, between processes: who holds it, and that it goes with its holder."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from meshwright.errors import InputError
from meshwright.train.choose_folder import LOCK, hold_folder
from tests.helpers import clean_environment

HOLDER = """
import sys
from contextlib import ExitStack
from pathlib import Path
from meshwright.errors import InputError
from meshwright.train.choose_folder import hold_folder

with ExitStack() as hold:
    try:
        hold_folder(Path(sys.argv[1]), hold)
        print("held", flush=True)
    except InputError:
        print("refused", flush=True)
    sys.stdin.read()
"""


def start(folder):
    return subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], env=clean_environment(), text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip


def take(folder):
    with ExitStack() as hold:
        hold_folder(folder, hold)
        assert (folder / LOCK).read_text().startswith(f"process {os.getpid()} on host ")


def test_the_other_process_is_named(tmp_path):
    with start(tmp_path) as other:
        assert other.stdout.readline() == "held\n"
        who = f"process {other.pid} on host {socket.gethostname()}"
        with pytest.raises(InputError, match=f"is being written by another run: {who}") as caught:
            take(tmp_path)
        assert caught.value.where == str(tmp_path / LOCK) and (tmp_path / LOCK).exists()
        other.stdin.close()
        other.wait()
        assert not (tmp_path / LOCK).exists()
    take(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_leaves_locks_nothing(tmp_path):
    with start(tmp_path) as other:
        assert other.stdout.readline() == "held\n"
        other.send_signal(signal.SIGKILL)
        other.wait()
    assert (tmp_path / LOCK).exists()
    take(tmp_path)
    assert not (tmp_path / LOCK).exists()


def test_of_processes_that_start_at_once_one_holds_it(tmp_path):
    others = [start(tmp_path) for _ in range(4)]
    said = sorted(other.stdout.readline() for other in others)
    for other in others:
        other.communicate()
    assert said == ["held\n"] + 3 * ["refused\n"]


def test_a_file_that_its_holder_removed_meanwhile_is_not_the_lock(tmp_path, monkeypatch):
    """Opened before the holder let go, locked after it."""
    flock, calls = fcntl.flock, []

    def late(file, operation):
        calls.append(operation)
        if len(calls) == 1:
            (tmp_path / LOCK).unlink()
        flock(file, operation)

    monkeypatch.setattr("meshwright.train.choose_folder.fcntl.flock", late)
    with ExitStack() as hold:
        hold_folder(tmp_path, hold)
        with pytest.raises(InputError):
            take(tmp_path)
    assert len(calls) == 3


def test_a_file_system_without_locks_is_no_error(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("meshwright.train.choose_folder.fcntl.flock", refuse)
    with ExitStack() as hold:
        hold_folder(tmp_path, hold)
