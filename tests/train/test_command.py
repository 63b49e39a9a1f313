"""`meshwright run` as a process of its own, from the outside: what it writes, where it listens, how it is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.checkpoint.manifest import list_checkpoints, verify
from meshwright.plan.rules import load
from meshwright.train.launch.launcher import SAME_S
from tests.helpers import clean_environment, small_corpus
from tests.train.runs import (
    STEPS,
    Hold,
    assert_bitwise_equal,
    descendants,
    is_alive,
    listeners,
    metrics,
    num_steps,
    rank_pids,
    start,
    wait_until,
)

ENDS_S = 300
"""A loaded machine takes its time; what waits for a lost rank waits for train.timeout_s = 600."""
LAYOUT = ["mesh.dp_shard=2", "train.steps=30", "checkpoint.every=5"]
FOREVER = ["train.steps=100000", "checkpoint.every=0", "train.validate_every=0"]

LOSS = "loss_bits_per_byte"


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return [*STEPS, *small_corpus(tmp_path_factory.mktemp("corpus")), *LAYOUT]


class Finished:
    """A run that was only halted for a while, and what was seen of it then."""

    def __init__(self, words, out):
        self.out = out
        hold = Hold(out.with_name("hold"), rank=1, phase="step", step=7)
        process = start(words, out, **hold.environment())
        hold.wait()
        self.pids = {process.pid, *descendants(process.pid)}
        self.listeners = set(listeners(sorted(self.pids)))
        hold.release()
        self.stdout, self.stderr = process.communicate()
        self.returncode = process.returncode


@pytest.fixture(scope="module")
def finished(words, tmp_path_factory):
    return Finished(words, tmp_path_factory.mktemp("finished") / "run")


@pytest.mark.slow
def test_what_a_run_prints(finished):
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert "\x1b" not in finished.stdout + finished.stderr and "\r" not in finished.stdout
    assert lines[0].startswith("llama-tiny · 459 k parameters · 1 file of ")
    assert lines[1].startswith("mesh dp_shard 2 = 2 processes (cpu, gloo) · batch 8 × 32 tokens")
    for text in ("step 10/30  loss ", "step 20  validation ", "30 steps in ", "checkpoints/00000030", "sample"):
        assert any(text in line for line in lines), text
    assert max(map(len, lines)) <= 200 and finished.stderr == ""


@pytest.mark.slow
def test_what_a_run_leaves(finished, words):
    names = {path.name for path in finished.out.iterdir()}
    files = {"config.toml", "plan.json", "metrics.jsonl", "events.jsonl", "report.html", "loss.png"}
    assert names == {*files, "checkpoints"}
    report = (finished.out / "report.html").read_text("utf-8")
    assert ">complete<" in report
    [time] = re.findall(r" 30 steps in (.+?) ·", finished.stdout)
    assert f">{time}<" in report, "the time of the terminal"
    assert load(str(finished.out / "config.toml")) == load(None, words)
    assert (finished.out / "loss.png").read_bytes().startswith(b"\x89PNG")
    found = list_checkpoints(finished.out / "checkpoints")
    assert [path.name for path in found] == ["00000020", "00000025", "00000030"]
    assert [verify(path).step for path in found] == [20, 25, 30]


@pytest.mark.slow
def test_metrics_have_one_object_a_step(finished):
    lines = [json.loads(line) for line in (finished.out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 31))
    for line in lines:
        assert line.keys() >= {"step", LOSS, "grad_norm", "lr", "tokens_per_s", "memory_bytes", "samples", "skipped"}
        assert line["samples"] == [(line["step"] - 1) * 8, line["step"] * 8 - 1]
        assert line[LOSS] > 0 and line["grad_norm"] > 0 and line["tokens_per_s"] > 0
        assert 50e6 < line["memory_bytes"] < 4e9 and line["skipped"] is False
        assert (f"validation_{LOSS}" in line) == (line["step"] % 4 == 0 or line["step"] == 30)
    assert lines[-1][LOSS] < lines[0][LOSS] - 1


@pytest.mark.slow
def test_local_runs_listen_on_loopback_only(finished):
    assert len(finished.pids) >= 4  # the launcher, the process it forks from, two ranks
    assert finished.listeners, "gloo listens somewhere: the test looked at the wrong moment"
    assert all(listener.is_loopback() for listener in finished.listeners), finished.listeners


@pytest.mark.parametrize(
    ("address", "is_loopback"), [("0.0.0.0", False), ("::", False), ("127.0.0.1", True), ("::1", True)]
)
def test_a_listener_off_loopback_would_be_seen(address, is_loopback):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    code = (
        f"import socket, sys; s = socket.socket({int(family)}); s.bind(({address!r}, 0)); s.listen(); "
        "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as one:
        port = int(one.stdout.readline())
        [found] = listeners([one.pid])
        one.stdin.close()
    assert (found.port, found.address, found.is_loopback()) == (port, address, is_loopback)


def ends_in_time(process, *, timeout_s=ENDS_S):
    """Both outputs of a process that ends in time, and leaves no other behind."""
    left = set(descendants(process.pid))
    try:
        output = process.communicate(timeout=timeout_s)
        wait_until(lambda: not any(map(is_alive, left)))
        return output
    finally:
        for pid in filter(is_alive, {process.pid, *left}):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_rank_killed_from_outside(forked_meshwright, words, finished, tmp_path):
    """The others end, the message names rank and step; resumed, all is bitwise as if nothing had happened."""
    hold = Hold(tmp_path.with_name("hold"), rank=1, phase="step", step=13)
    process = start(words, tmp_path, **hold.environment())
    hold.wait()
    wait_until(lambda: num_steps(tmp_path) == 12)  # rank 0 may still be writing it
    pids = rank_pids(process.pid)
    assert len(pids) == 2
    os.kill(pids[1], signal.SIGKILL)
    _, stderr = ends_in_time(process)
    assert process.returncode == 1
    assert "rank 1 was killed by SIGKILL in step 13" in stderr, stderr
    assert "meshwright run " in stderr and "Traceback" not in stderr
    assert num_steps(tmp_path) == 12
    done = forked_meshwright("run", *words, "--out", tmp_path, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert re.search(r"resuming from .*/checkpoints/00000010\n", done.stdout)
    assert_bitwise_equal(tmp_path, finished.out)


@pytest.mark.slow
def test_a_run_is_repeated_from_its_own_config(forked_meshwright, words, finished, tmp_path):
    done = forked_meshwright("run", finished.out / "config.toml", "--out", tmp_path / "again", "--quiet")
    assert done.returncode == 0 and done.stdout == "" and done.stderr == ""
    assert_bitwise_equal(tmp_path / "again", finished.out)


@pytest.mark.slow
def test_a_finished_run_has_nothing_left_to_do(forked_meshwright, words, finished):
    before = (finished.out / "metrics.jsonl").read_bytes()
    done = forked_meshwright("run", *words, "--out", finished.out, "--resume", "auto")
    assert done.returncode == 0 and "nothing left to train" in done.stdout
    assert (finished.out / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_rank(words, tmp_path):
    process = start([*words, *FOREVER], tmp_path)
    wait_until(lambda: num_steps(tmp_path) >= 3)
    assert len(rank_pids(process.pid)) == 2
    left = descendants(process.pid)
    process.kill()
    try:
        wait_until(lambda: not any(map(is_alive, left)), timeout_s=ENDS_S)
    finally:
        for pid in filter(is_alive, left):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(words, tmp_path):
    """In a step that does not end: the first signal is still waited for."""
    hold = Hold(tmp_path / "hold", rank=1, phase="step", step=3)
    process = start(words, tmp_path / "run", **hold.environment())
    hold.wait()
    process.send_signal(signal.SIGINT)
    while "stopping after this step" not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(SAME_S)
    process.send_signal(signal.SIGINT)
    _, stderr = ends_in_time(process)
    assert process.returncode == 1 and "killed by a second interrupt" in stderr


@pytest.mark.slow
def test_a_signal_while_the_server_starts_stops_after_the_first_step(words, tmp_path):
    """To all processes, as a terminal sends Ctrl-C and service managers SIGTERM.

    Earlier, amid imports: tests/cli/test_interrupt.py.
    """
    process = start([*words, *FOREVER], tmp_path, new_session=True)
    wait_until(lambda: descendants(process.pid))
    os.killpg(process.pid, signal.SIGINT)
    assert stopped(process, tmp_path) == 1


@pytest.mark.slow
def test_a_signal_stops_after_the_step_saved(forked_meshwright, words, tmp_path):
    """`timeout` tells the command first, and then all processes."""
    process = start([*words, *FOREVER], tmp_path, new_session=True)
    wait_until(lambda: num_steps(tmp_path) >= 3)
    process.send_signal(signal.SIGTERM)
    os.killpg(process.pid, signal.SIGTERM)
    step = stopped(process, tmp_path)
    assert num_steps(tmp_path) == step
    done = forked_meshwright("run", *words, f"train.steps={step + 2}", "--out", tmp_path, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, step + 3))


def stopped(process, out):
    """The step after which a run stopped as it was asked to, which is saved."""
    _, stderr = ends_in_time(process)
    assert process.returncode == 3 and "Traceback" not in stderr
    assert "stopping after this step" in stderr
    step = int(re.search(r"stopped after step (\d+), as requested; saved .*/0*\1\n", stderr)[1])
    assert verify(list_checkpoints(out / "checkpoints")[-1]).step == step
    return step


@pytest.mark.slow
def test_environment_of_a_single_rank_needs_no_address(forked_meshwright, words, tmp_path):
    alone = ["mesh.dp_shard=1", "train.precision=bfloat16", "train.steps=2"]
    done = forked_meshwright(
        "run", *words, *alone, "--out", tmp_path / "run", env=clean_environment(RANK="0", WORLD_SIZE="1")
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_compiled_ranks_leave_no_compiler_behind(words, tmp_path):
    """Inductor compiles in processes of its own; rank 0 is killed when the first of them is there."""
    process = start([*words, *FOREVER, "train.compile=true", "model.num_layers=1"], tmp_path / "run",
                    TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))  # fmt: skip
    compilers = wait_until(lambda: list(filter(is_compiler, descendants(process.pid))))
    os.kill(rank_pids(process.pid)[0], signal.SIGKILL)
    _, stderr = ends_in_time(process)
    assert "rank 0 was killed by SIGKILL" in stderr
    wait_until(lambda: not any(map(is_alive, compilers)))


def is_compiler(pid):
    try:
        return re.search(rb"g\+\+|cc1plus|clang|compile_worker", Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:  # it has ended
        return False
