"""Text is broken between words, and figures stay with their units."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cli.wrapping import CODE, show, wrapped

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
