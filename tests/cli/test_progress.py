"""What a person sees of a run: one line that rewrites itself on a terminal, plain lines anywhere else."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.cli import progress as module
from meshwright.cli.main import show_error
from meshwright.cli.progress import TerminalReporter
from meshwright.errors import RunError
from meshwright.plan.traffic import LinkBytes, Purpose, Traffic, TrafficEntry
from meshwright.train.record.reporter import LossUnit, Progress, Start, Summary, Validation
from tests.helpers import clean_environment, meshwright

TRAFFIC = Traffic(0, (TrafficEntry(Purpose.GRADIENTS, LinkBytes(100_000, 30_000), LinkBytes(400_000, 300_000)),
                      TrafficEntry(Purpose.STAGES, LinkBytes(500_000, 0), LinkBytes(500_000, 0))))  # fmt: skip

SUMMARY = Summary(steps=30, seconds=3.0, validation=Validation(2.0, {"drawn_recognised": 0.75}), steps_here=30,
                  traffic=TRAFFIC, counted=None, folder=Path("runs/x-1"),
                  checkpoint=Path("runs/x-1/checkpoints/00000030"),
                  sample="def f\x1b[31m(\x00):\n    pass")  # fmt: skip

FACTS = Start(name="x", num_params=10, corpus="some text", mesh="dp_shard 2", num_ranks=2, device="cpu",
              backend="gloo", global_batch=8, seq_len=64, steps=30, predicted_bytes=10**9, traffic=TRAFFIC,
              folder=Path("runs/x-1"), unit=LossUnit("bits/byte", 1.25))  # fmt: skip


def step(number, *, steps=30, skipped=False, loss=2.0):
    return Progress(step=number, steps=steps, loss=loss, grad_norm=1.0, tokens_per_s=1e4,
                    memory_bytes=10**9, eta_s=1.0, skipped=skipped)  # fmt: skip


@contextmanager
def terminal(monkeypatch, *, columns=60):
    """Makes stdout and stderr a terminal; gives a function that reads what was written to it."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    attributes = termios.tcgetattr(follower)
    attributes[1] &= ~termios.OPOST  # no \n → \r\n
    termios.tcsetattr(follower, termios.TCSANOW, attributes)
    os.set_blocking(leader, False)
    stream = os.fdopen(follower, "w")
    with monkeypatch.context() as patch:
        patch.delenv("COLUMNS", raising=False)
        patch.setenv("TERM", "xterm")
        for name in ("stdout", "__stdout__", "stderr"):
            patch.setattr(sys, name, stream)
        patch.setattr(module, "REFRESH_S", 0.0)

        def read():
            stream.flush()
            text = b""
            while True:
                try:
                    text += os.read(leader, 65536)
                except BlockingIOError:
                    return text.decode()

        yield read
    stream.close()
    os.close(leader)


def rows(text, columns):
    """The rows that a terminal shows after `text`; fails when a row would have wrapped."""
    shown = []
    for line in text.split("\n"):
        row = ""
        for part in re.split(r"(\r|\x1b\[2K)", line):
            row = "" if part in ("\r", "\x1b[2K") else row + part
            visible = re.sub(r"\x1b\[\d+m", "", row)
            assert len(visible) < columns, f"wraps: {visible!r}"
        shown.append(re.sub(r"\x1b\[\d+m", "", row))
    return shown


@pytest.mark.parametrize("columns", [20, 60, 200])
def test_the_progress_line_rewrites_itself_and_fits(monkeypatch, columns):
    with terminal(monkeypatch, columns=columns) as read:
        reporter = TerminalReporter()
        for number in range(1, 31):
            reporter.progress(step(number, loss=3.0 - number / 30))
        reporter.waiting("a wait whose description is rather longer than twenty columns")
        text = read()
    assert text.count("\r") >= 30
    shown = rows(text, columns)
    assert [row[:10] for row in shown] == ["step 10/30", "step 20/30", "step 30/30", "a wait who"]


@pytest.mark.parametrize("columns", [50, 60, 70, 80, 90, 100])
@pytest.mark.parametrize("load", [None, 1.834])
def test_a_narrow_terminal_does_without_the_least_important(monkeypatch, columns, load):
    with terminal(monkeypatch, columns=columns) as read:
        reporter = TerminalReporter(log_every=100)
        for number in range(1, 31):
            reporter.progress(replace(step(number, steps=31), expert_load=load))
        [shown] = rows(read(), columns)
        reporter.progress(step(31, steps=31))
        [last, _] = rows(read(), columns)
    assert "step 30/31" in shown and "loss 2.000" in shown and "ETA 1.0 s" in shown
    assert "step 31/31" in last and "ETA" not in last
    assert ("tok/s" in shown) >= ("grad norm" in shown) >= ("GiB" in shown) >= ("▁" in shown)
    assert ("load 1.83×" in shown) is (load is not None and columns >= 80)
    assert load is None or ("tok/s" in shown) >= ("load 1.83×" in shown) >= ("grad norm" in shown)
    assert load or ("▁" in shown) is (columns >= 100)


@pytest.mark.parametrize(
    ("here", "words"), [(30, "30 steps in 3.0 s"), (10, "10 of 30 steps in 3.0 s"), (0, "30 steps")]
)
def test_the_time_is_that_of_the_steps_of_this_command(capsys, here, words):
    """And only steps that were all its own can be repeated by the configuration that is there now."""
    TerminalReporter().finished(replace(SUMMARY, steps_here=here))
    shown = capsys.readouterr().out
    assert f" · {words} · run folder" in shown and ("repeat:" in shown) is (here == 30)


def test_the_start_of_the_slowest_rank_is_told_at_the_end(capsys):
    reporter = TerminalReporter()
    reporter.under_way([{"data": 0.01, "model": 3.0}, {"data": 1.25, "model": 0.5, "first step": 12.0}])
    assert capsys.readouterr().out == ""
    reporter.finished(SUMMARY)
    assert "  first step after 14 s: data 1.2 s · model 0.5 s · first step 12 s\n" in capsys.readouterr().out


def test_figures_are_named_at_the_end(capsys):
    for figures in (("loss.png",), ("loss.png", "expert-load.png")):
        TerminalReporter().finished(replace(SUMMARY, figures=figures))
        assert f"  report.html · metrics.jsonl · {' · '.join(figures)} · checkpoints/" in capsys.readouterr().out


def test_other_lines_do_not_mix_with_the_progress_line(monkeypatch):
    with terminal(monkeypatch, columns=120) as read:
        reporter = TerminalReporter()
        reporter.started(FACTS)
        reporter.progress(step(1))
        reporter.note("a note")
        reporter.progress(step(2))
        reporter.validated(2, Validation(2.0, {"drawn_recognised": 0.75}))
        reporter.progress(step(3))
        show_error(RunError("rank 1 was killed"))
        shown = rows(read(), 120)
    assert shown[4:-2] == ["a note", "step 2  validation 2.500 bits/byte · drawn recognised 0.750"]
    assert shown[-2] == "error  rank 1 was killed"


def test_what_is_sent_is_said_before_and_after(capsys):
    for traffic in (TRAFFIC, Traffic(0, ())):
        reporter = TerminalReporter()
        reporter.started(replace(FACTS, traffic=traffic))
        reporter.finished(replace(SUMMARY, traffic=traffic, counted=Traffic(0, TRAFFIC.entries[:1])))
    assert [line for line in capsys.readouterr().out.splitlines() if "iB" in line and "· predicted" not in line] == [
        "each rank sends at most 615 KiB per step (uncompressed 1.14 MiB): stages 488 KiB · gradients 127 KiB",
        "  586 KiB instead of 879 KiB inside a node · 29.3 KiB instead of 293 KiB between nodes",
        "  sent in 30 steps, predicted: 18.0 MiB per rank (uncompressed 34.3 MiB) · 17.2 MiB instead of 25.7 MiB "
        "inside a node · 879 KiB instead of 8.58 MiB between nodes",
        "  counted on rank 0: 127 KiB of gradients and weights (uncompressed 684 KiB) · 97.7 KiB instead of 391 KiB "
        "inside a node · 29.3 KiB instead of 293 KiB between nodes",
    ]


def test_no_color_is_honoured(monkeypatch):
    for no_color in (False, True):
        with terminal(monkeypatch, columns=200) as read:
            if no_color:
                monkeypatch.setenv("NO_COLOR", "1")
            TerminalReporter().finished(SUMMARY)
            show_error(RunError("x"))
            assert ("\x1b[" in read().replace("\x1b[2K", "")) is not no_color


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    with terminal(monkeypatch) as read:
        monkeypatch.setenv("TERM", "dumb")
        reporter = TerminalReporter(log_every=10)
        for number in range(1, 31):
            reporter.progress(step(number))
        show_error(RunError("x"))
        text = read()
    assert "\x1b" not in text and "\r" not in text and text.count("\n") == 5


def test_off_a_terminal_lines_are_plain_and_few(capsys):
    reporter = TerminalReporter(log_every=10)
    for number in range(1, 31):
        reporter.progress(step(number))
    reporter.waiting("something")
    reporter.finished(SUMMARY)
    text = capsys.readouterr().out
    assert "\x1b" not in text and "\r" not in text and "\0" not in text
    assert [line.split("  ")[0] for line in text.splitlines()[:4]] == [f"step {n}/30" for n in (1, 10, 20, 30)]


def test_quiet_says_nothing(capsys):
    reporter = TerminalReporter(quiet=True)
    reporter.progress(step(1, skipped=True))
    reporter.note("x")
    reporter.validated(1, Validation(2.0))
    reporter.finished(SUMMARY)
    assert capsys.readouterr().out == ""


def test_a_skipped_step_is_said_once_and_does_not_break_the_bars(monkeypatch):
    with terminal(monkeypatch, columns=100) as read:
        reporter = TerminalReporter()
        reporter.progress(step(1))
        reporter.progress(step(2, skipped=True, loss=float("nan")))
        reporter.progress(step(3))
        text = read()
    assert text.count("step 2 was not finite and was skipped") == 1
    assert "step 3/30" in text


def test_an_encoding_without_bars_and_dots_is_no_reason_to_fail():
    done = meshwright("presets", env=clean_environment(PYTHONIOENCODING="ascii", PYTHONUTF8="0"))
    assert done.returncode == 0 and "llama3-70b" in done.stdout and "?" in done.stdout


def test_the_command_to_repeat_a_run_is_one_that_a_shell_takes(capsys):
    TerminalReporter().started(FACTS)
    TerminalReporter().finished(replace(SUMMARY, folder=Path("my runs/x-1")))
    assert "repeat: meshwright run 'my runs/x-1/config.toml'\n" in capsys.readouterr().out
