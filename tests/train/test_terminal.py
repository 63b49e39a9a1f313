"""A run on a real terminal: one line that rewrites itself, between the few that stay."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import pty
import re
import struct
import sys
import termios
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from tests.forked_command import _run
from tests.helpers import clean_environment, small_corpus
from tests.train.runs import STEPS

COLUMNS = 72


def run_on(terminal, arguments, environment):
    """Run the command where all that is written goes to a terminal."""
    with open(terminal, "w") as sys.stdout, open(terminal, "w") as sys.stderr:
        _run(arguments, environment, Path.cwd(), [terminal] * 2)


def on_a_terminal(words, **environment):
    """Exit code of the command, forked from the server of gangs, and all that it wrote to a terminal of `COLUMNS`."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    arguments, environment = ["meshwright", "run", *words], clean_environment(TERM="xterm", **environment)
    process = multiprocessing.get_context("forkserver").Process(
        target=run_on, args=(os.ttyname(follower), arguments, environment)
    )
    process.start()
    written = b""
    while leader in wait([leader, process.sentinel]):
        written += os.read(leader, 65536)
    process.join()
    os.close(follower)
    os.close(leader)
    return process.exitcode, written.decode()


@pytest.mark.slow
def test_one_line_rewrites_itself_and_fits(gang, tmp_path):
    words = [*STEPS, *small_corpus(tmp_path), "train.steps=12", "--out", str(tmp_path / "run")]
    code, text = on_a_terminal(words)
    assert code == 0, text
    lines = text.replace("\r\n", "\n").split("\n")
    live = [shown for line in lines for shown in re.split(r"\r\x1b\[2K", line)[:-1] if shown]
    assert any(shown.startswith("reading the data") for shown in live)
    assert any(shown.startswith("step ") and "ETA" in shown for shown in live)
    assert all(len(re.sub(r"\x1b\[\d+m", "", shown)) < COLUMNS for shown in live), live
    stays = [re.sub(r"\x1b\[\d+m", "", re.split(r"\r\x1b\[2K", line)[-1]) for line in lines]
    assert stays[0].startswith("llama-tiny · ") and any(line.startswith("1 process (cpu)") for line in stays)
    kept = [line.split("  ")[0] for line in stays if line.startswith("step ") and "  loss " in line]
    assert kept == ["step 10/12", "step 12/12"] and len(stays) < 25
    assert "\x1b[32m" in text and "\x1b[1m" in text


@pytest.mark.slow
def test_without_colour_where_none_is_wanted(gang, tmp_path):
    words = [*STEPS, *small_corpus(tmp_path), "train.steps=2", "--out", str(tmp_path / "run")]
    code, text = on_a_terminal(words, NO_COLOR="1")
    assert code == 0 and set(re.findall(r"\x1b\[[\d;]*[A-Za-z]", text)) == {"\x1b[2K"}
