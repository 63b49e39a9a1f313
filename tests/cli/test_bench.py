"""`meshwright bench` is the command of the installed benchmarks, and otherwise an error that says how to get them."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from meshwright.cli import main as bench
from meshwright.errors import InputError


def invoke(*words):
    app = typer.Typer()
    app.callback()(lambda: None)
    bench.add_bench(app)
    return CliRunner().invoke(app, ["bench", *words])


def test_where_they_are_installed_a_mistyped_option_is_refused():
    error = invoke("train", "--ruonds", "3").exception
    assert error.what == "unknown option --ruonds" and error.fix == "--rounds" and error.exit_code == 2


@pytest.mark.parametrize("words", [[], ["train"], ["train", "--rounds", "3", "--json", "-"]])
def test_where_they_are_not_any_words_end_in_the_error(monkeypatch, words):
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    error = invoke(*words).exception
    assert isinstance(error, InputError)
    assert "not installed" in error.what and "pip install ./bench" in error.fix
