"""`meshwright report` as a user meets it: without torch, into the run's folder or a file."""

from __future__ import annotations

import pytest

from tests.helpers import meshwright
from tests.train.report.folders import write_folder


@pytest.fixture
def runs(tmp_path):
    return [
        write_folder(tmp_path / name, ["llama-tiny", f"train.lr={lr}"]) for name, lr in (("a", 0.001), ("b", 0.002))
    ]


def test_the_report_of_a_run_goes_into_its_folder_and_needs_no_torch(runs, no_torch):
    done = meshwright("report", str(runs[0]), env=no_torch)
    assert done.returncode == 0 and done.stdout == f"report  {runs[0] / 'report.html'}\n", done.stderr
    assert "<title>llama-tiny · Meshwright</title>" in (runs[0] / "report.html").read_text("utf-8")


def test_a_comparison_goes_into_a_file(runs, here, tmp_path):
    done = here("report", *map(str, runs), "-o", str(tmp_path / "both.html"))
    assert done.returncode == 0 and "<title>2 runs · Meshwright</title>" in (tmp_path / "both.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{a}", "{b}"], "no file for the comparison of 2 runs"),
        (["{a}", "-o", "missing/x.html"], "folder not found: missing"),
        (["missing"], "missing is not a run folder"),
        (["{a}", "{a}", "-o", "x.html"], "is given twice"),
        ([], "RUN..."),
    ],
)
def test_bad_input_is_refused_with_a_fix(runs, here, words, message):
    done = here("report", *(word.format(a=runs[0], b=runs[1]) for word in words))
    assert done.returncode == 2 and message in done.stdout + done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not (runs[0] / "report.html").exists()
