"""What the pages say that plans, figures and errors print is what they print; `test_pages` has the other commands."""

from __future__ import annotations

import contextlib
import shlex

import pytest

from meshwright.cli.main import main
from tests.docs.console import ROOT, missing, shown

BLOCKS = list(shown())
INSTANT = [one for one in BLOCKS if one.command.startswith(("meshwright plan", "meshwright draw reshard"))
           or (one.lines and one.lines[0].startswith("error "))]  # fmt: skip


def names(blocks):
    return [f"{one.page}-{' '.join(one.command.split()[1:4])}" for one in blocks]


def output(command, monkeypatch, capsys, folder):
    """What a command prints in an empty folder, to either stream."""
    monkeypatch.chdir(folder)
    (folder / "docs").mkdir()
    monkeypatch.setattr("sys.argv", shlex.split(command))
    with contextlib.suppress(SystemExit):
        main()
    return "\n".join(capsys.readouterr())


def test_the_pages_have_commands():
    assert len(INSTANT) >= 8


SHOWN = [pytest.param(one, marks=[pytest.mark.slow] * ("hf-tiny" in one.command)) for one in INSTANT]
"""Slow where a model of transformers is derived."""


@pytest.mark.parametrize("block", SHOWN, ids=names(INSTANT))
def test_plans_draws_and_errors_print_what_is_shown(block, monkeypatch, capsys, tmp_path):
    found = output(block.command, monkeypatch, capsys, tmp_path)
    assert not missing(block.lines, found, numbers=True), found


def test_lines_that_are_not_printed_are_found():
    found = "a 1.5 MiB\nb 2\nc"
    assert not missing(["a 1.5 MiB", "…", "c"], found, numbers=True)
    assert missing(["a 1.6 MiB", "c"], found, numbers=True) == ["a 1.6 MiB"]
    assert not missing(["a 1.6 GiB", "b 3"], found, numbers=False)
    assert missing(["c", "b 2"], found, numbers=True) == ["b 2"], "lines are in order"
    assert not missing(["b …", "c"], found, numbers=True)
    assert ROOT.joinpath("README.md").exists()


def test_the_figures_of_the_python_page_are_those_of_its_code():
    source = ROOT.joinpath("docs", "python.md").read_text("utf-8").partition("```python\n")[2].partition("result = ")[0]
    *code, memory, sent = source.strip().splitlines()
    names = {}
    exec("\n".join(code), names)
    for line in (memory, sent):
        expression, _, comment = line.partition("  # ")
        assert eval(expression, names) == int(comment.split()[0]), line
