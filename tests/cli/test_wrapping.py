"""Text is broken between words, and every page, table and error fits a terminal of 80 columns."""

from __future__ import annotations

import io
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cli.wrapping import CODE, FIGURE, show, wrapped
from tests.helpers import run_folder

HEADER = "1 process (cpu) · batch 16 × 128 tokens · predicted 0.31 GiB per rank · runs/a-1"


@pytest.mark.parametrize("columns", range(20, 90))
def test_figures_stay_with_their_units(columns):
    lines = list(wrapped(HEADER, columns))
    assert all(len(line) <= columns for line in lines)
    for whole in ("16 × 128 tokens", "0.31 GiB", "(cpu)", "runs/a-1"):
        assert sum(whole in line for line in lines) == 1
    assert " ".join(line.strip() for line in lines) == HEADER


def test_codes_take_no_columns_and_long_words_stay_whole():
    text = "\x1b[1mname\x1b[0m four five"
    assert list(wrapped(text, 9)) == ["\x1b[1mname\x1b[0m four", "    five"]
    assert list(wrapped("a /a/long/path b", 6)) == ["a", "    /a/long/path", "    b"]
    assert list(wrapped("  indented line", 12)) == ["  indented", "    line"]


@given(st.text("ab 12×=·", max_size=40), st.integers(1, 50))
def test_nothing_is_lost(text, columns):
    shown = "".join(wrapped(text, columns, more=""))
    assert shown.replace(" ", "") == CODE.sub("", text).replace(" ", "")


def test_each_line_of_a_text_is_broken_by_itself(monkeypatch, capsys):
    monkeypatch.setattr("meshwright.cli.wrapping.is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "20")
    show("a b\n  indented lines of a text\nc")
    assert capsys.readouterr().out == "a b\n  indented lines of\n    a text\nc\n"


COLUMNS = 80


class Screen(io.StringIO):
    """A terminal that keeps what is written to it."""

    def isatty(self):
        return True


@pytest.fixture
def shown(here, monkeypatch):
    """Runs the command on a terminal of 80 columns, and gives the lines that stay."""

    def run(*words, code=0):
        screen = Screen()
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setattr(sys, "stderr", screen)
        assert here(*words, TERM="xterm", COLUMNS=str(COLUMNS)).returncode == code, screen.getvalue()
        return [re.split(r"\r\x1b\[2K", line)[-1] for line in screen.getvalue().rstrip("\n").split("\n")]

    return run


PAGES = {
    "plan": "plan",
    "experts": "plan moe-tiny mesh.dp_shard=4 mesh.ep=2 mesh.tp=2",
    "images": "plan dit-xl-2",
    "context parallel": "plan mistral-7b mesh.cp=4",
    "packed documents": "plan llama-tiny mesh.cp=2 mesh.pp=2 data.packing=documents",
    "compressed": "plan llama3-70b mesh.tp=1 comm.gradients=loco4 comm.weights=int8 comm.ranks_per_node=8",
    "captured": "plan llama-tiny mesh.pp=2 pipeline.schedule=zb-v capture.scope=layer recompute.policy=selective",
    "float8": "plan llama3-8b float8.recipe=delayed float8.keep_first=2 mesh.pp=4",
    "diff": "plan llama-tiny --diff llama3-8b",
    "presets": "presets",
    "devices": "presets --devices",
    "preset": "presets video-dit-xl",
    "1f1b": "draw pipeline 1f1b --stages 8 --microbatches 64 --simulate",
    "capture": "draw capture zb-v --stages 4 --microbatches 16 --layers 4,3",
    "reshard": "draw reshard S0,R R,S1 --mesh 4,8 --shape 8192,8192",
    "three axes": "draw reshard S0,S1,S0 S1,S0,P --mesh 16,16,16 --shape 1048576,8192 --topology H100",
    "torchrun": "launch torchrun --nodes 2 --gpus-per-node 4 llama-tiny mesh.dp_shard=8 -o nodes.sh",
}
ERRORS = {
    "value": "run llama-tiny mesh.tp=3",
    "preset": "run no-such-preset",
    "source": "run data.source=no-such-file.txt",
    "tracker": "run train.trackers=wandbb",
    "part": "bench",
    "schedule": "draw pipeline no-such",
    "checkpoint": "checkpoint ls no-such",
}
HELP = ("", "plan", "run", "prove", "report", "presets", "doctor", "bench", "draw", "draw pipeline", "draw capture",
        "draw reshard", "draw loss", "checkpoint", "checkpoint ls", "checkpoint import", "launch",
        "launch slurm", "launch kubernetes", "launch torchrun")  # fmt: skip


def words_of(command):
    return [word.replace(",", " ") if re.match(r"S?[SRP]", word) else word for word in command.split()]


def assert_fits(lines):
    assert lines
    too_long = [line for line in (CODE.sub("", line) for line in lines) if len(line) > COLUMNS]
    assert not too_long, "\n".join(too_long)


@pytest.mark.parametrize("command", PAGES.values(), ids=PAGES)
def test_pages(shown, command):
    assert_fits(shown(*words_of(command)))


@pytest.mark.parametrize("command", ERRORS.values(), ids=ERRORS)
def test_errors(shown, command):
    lines = shown(*command.split(), code=2)
    assert_fits([line for line in lines if not CODE.sub("", line).startswith(("where", "fix"))])  # these are copied
    plain = [CODE.sub("", line) for line in lines]
    assert [line.split()[0] for line in plain if line[0] != " "] == ["error", "where", "rule", "fix"]
    assert all(line[:7].strip() in ("error", "where", "rule", "fix", "") for line in plain)


@pytest.mark.parametrize("command", HELP)
def test_help(shown, command):
    lines = shown(*command.split(), "--help")
    assert_fits(lines)
    assert not any(re.search(r"\w…", line) for line in lines), "help is cut off"


def test_losses_of_runs(shown, tmp_path):
    for name in ("a-run-with-quite-a-long-name", "b"):
        run_folder(tmp_path / name, [3.0, 2.0, 1.0], "name = 'x'\n")
    assert_fits(shown("draw", "loss", "a-run-with-quite-a-long-name", "b"))


def test_a_figure_broken_from_its_unit_or_a_long_line_is_noticed():
    with pytest.raises(AssertionError):
        assert_fits(["x" * (COLUMNS + 1)])
    assert_fits(["\x1b[1m" + "x" * COLUMNS + "\x1b[0m"])
    assert FIGURE.search("0.31 GiB") and list(wrapped("a 0.31 GiB", 6)) == ["a", "    0.31 GiB"]
