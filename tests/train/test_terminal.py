"""A run on a real terminal: one line that rewrites itself, between the few that stay."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from tests.helpers import clean_environment, small_corpus
from tests.train.runs import STEPS

COLUMNS = 72


def on_a_terminal(words, **environment):
    """Exit code of the command, and everything that it wrote to a terminal of `COLUMNS` columns."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright", "run", *words], stdin=follower, stdout=follower, stderr=follower,
        env=clean_environment(TERM="xterm", **environment), start_new_session=True,
    )  # fmt: skip
    os.close(follower)
    written = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # Linux says so when nobody has the other end open
            break
        if not part:
            break
        written += part
    os.close(leader)
    return process.wait(timeout=60), written.decode()


@pytest.mark.slow
def test_one_line_rewrites_itself_and_fits(tmp_path):
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
    assert not any("ETA" in line for line in stays) and len(stays) < 25
    assert "\x1b[32m" in text and "\x1b[1m" in text


@pytest.mark.slow
def test_without_colour_where_none_is_wanted(tmp_path):
    words = [*STEPS, *small_corpus(tmp_path), "--out", str(tmp_path / "run")]
    code, text = on_a_terminal(words, NO_COLOR="1")
    assert code == 0 and set(re.findall(r"\x1b\[[\d;]*[A-Za-z]", text)) == {"\x1b[2K"}
