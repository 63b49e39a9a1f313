"""Output that goes away ends nothing: a reader of a pipe that stops, a closed terminal, a full disk."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from meshwright.checkpoint.manifest import list_checkpoints, verify
from meshwright.lasting_output import LastingStream, lasting_output, unwritten
from tests.helpers import SMALL, clean_environment
from tests.train.runs import Hold, num_steps

COMMAND = [sys.executable, "-m", "meshwright"]


class Broken(io.StringIO):
    """Stream whose writes fail."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO, errno.ENOSPC])
def test_a_write_that_fails_is_dropped_and_said_once(number: int, caplog: pytest.LogCaptureFixture) -> None:
    stream = LastingStream(Broken(number), warns=True)
    for _ in range(3):
        assert stream.write("text\n") == 5
    assert stream.error is not None and stream.error.errno == number
    assert [os.strerror(number) in message for message in caplog.messages] == [True]


@pytest.mark.parametrize(("number", "is_missed"), [(errno.EPIPE, False), (errno.ENOSPC, True)])
def test_a_full_disk_misses_what_a_reader_that_left_does_not(
    number: int, is_missed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", Broken(number))
    with lasting_output():
        print("text")
        assert (unwritten() is not None) == is_missed


def without_reader(words: Sequence[str | Path], cwd: Path, **environment: str) -> tuple[int, str]:
    """Return the exit code of a command whose stdout is a pipe that nobody reads any more, and what is on stderr."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*COMMAND, *words], cwd=cwd, env=clean_environment(**environment), stdout=writer, stderr=subprocess.PIPE,
        text=True, timeout=300,
    )  # fmt: skip
    os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "llama3-70b"],
        ["presets"],
        ["draw", "pipeline", "1f1b", "--stages", "4", "--microbatches", "8"],
        ["--help"],
    ],
)
def test_a_reader_that_stops_is_no_failure(words: list[str], tmp_path: Path) -> None:
    assert without_reader(words, tmp_path) == (0, "")


def test_nor_is_one_of_a_stream_without_a_buffer(tmp_path: Path) -> None:
    assert without_reader(["presets"], tmp_path, PYTHONUNBUFFERED="1") == (0, "")


def test_a_full_disk_is_one_for_who_reads_the_result(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "plan", "llama-tiny"], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert done.returncode == 1 and "No space left on device" in done.stderr and "Traceback" not in done.stderr


RUN = [*SMALL, "train.steps=4", "train.log_every=1", "train.validation_samples=4", "train.sample_tokens=0",
       "mesh.dp_shard=2", "--out", "run"]  # fmt: skip


def assert_complete(folder: Path) -> None:
    assert num_steps(folder) == 4 and verify(list_checkpoints(folder / "checkpoints")[-1]).step == 4
    assert (folder / "report.html").is_file()


@pytest.mark.slow
def test_a_run_goes_on_without_its_reader(tmp_path: Path) -> None:
    code, said = without_reader(["run", *RUN], tmp_path)
    assert code == 0 and "Traceback" not in said
    assert_complete(tmp_path / "run")
    assert "the run goes on without it" in (tmp_path / "run/logs/rank-0.log").read_text()


@pytest.mark.slow
def test_a_run_goes_on_after_its_terminal(tmp_path: Path) -> None:
    """As the kernel does it: all processes hear that the terminal is gone, and can't write to it."""
    hold = Hold(tmp_path / "hold", rank=0, phase="step", step=2)
    terminal, end = os.openpty()
    process = subprocess.Popen(
        [*COMMAND, "run", *RUN], cwd=tmp_path, env=clean_environment(**hold.environment()), stdin=end, stdout=end,
        stderr=end, start_new_session=True,
    )  # fmt: skip
    os.close(end)
    hold.wait()
    os.close(terminal)
    os.killpg(process.pid, signal.SIGHUP)
    hold.release()
    assert process.wait(240) == 0
    assert_complete(tmp_path / "run")


@pytest.mark.slow
def test_a_proof_without_a_reader_has_its_verdict(tmp_path: Path) -> None:
    assert without_reader(["prove", *SMALL, "mesh.dp_shard=2"], tmp_path)[0] == 0
