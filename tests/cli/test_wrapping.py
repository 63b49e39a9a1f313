"""Text is broken between words, and figures stay with their units."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cli.main import main
from meshwright.cli.wrapping import CODE, wrapped
from tests.train.report.folders import write_folder

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


PAGES = [
    ["presets"],
    ["presets", "--devices"],
    pytest.param(["doctor"], marks=pytest.mark.slow),  # imports every package
    ["plan", "llama3-405b", "mesh.pp=16", "mesh.dp_shard=128", "train.global_batch=2048", "train.num_microbatches=16"],
    ["plan", "moe-tiny", "mesh.dp_shard=4", "mesh.ep=2", "mesh.cp=2"],
    ["draw", "pipeline", "dualpipe-v", "--stages", "4", "--microbatches", "10", "--simulate"],
    ["draw", "loss", "{runs}/the-first-run-of-two", "{runs}/the-second-run-of-two"],
    ["checkpoint", "ls", "{runs}/the-first-run-of-two"],
    ["report", "{runs}", "-o", "{runs}/no/such/folder/report.html"],
    ["run", "llama-tiny", "mesh.tp=3"],
]


@pytest.mark.parametrize("words", PAGES, ids=lambda words: "-".join(words[:2]))
def test_pages_fit_a_terminal_of_80_columns_and_break_at_words(tmp_path, monkeypatch, capsys, words):
    monkeypatch.setenv("COLUMNS", "80")
    write_folder(tmp_path / "the-first-run-of-two", ["llama-tiny", "train.lr=0.001"])
    write_folder(tmp_path / "the-second-run-of-two", ["llama-tiny", "train.lr=0.002"], steps=30)
    monkeypatch.setattr("sys.argv", ["meshwright", *(word.format(runs=tmp_path) for word in words)])
    whole = pages(monkeypatch, capsys, is_terminal=False)
    found = pages(monkeypatch, capsys, is_terminal=True)
    assert found.split() == whole.split(), "nothing is left out, and no word is broken"
    long = [line for line in found.splitlines() if len(line) > 80 and not line.startswith(("fix", "where"))]
    assert all(str(tmp_path) in line or "/" in line for line in long), long


def pages(monkeypatch, capsys, *, is_terminal):
    monkeypatch.setattr("meshwright.cli.wrapping.is_terminal", lambda stream: is_terminal)
    with contextlib.suppress(SystemExit):
        main()
    out, error = capsys.readouterr()
    return out + error
