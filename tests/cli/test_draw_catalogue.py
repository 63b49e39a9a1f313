"""`meshwright draw catalogue`: what the docs show is drawn from their file, and other files are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.prove.catalogue import Outcome, Result, page, read_report, to_json
from tests.helpers import shown_error

DOCS = Path(__file__).parents[2] / "docs"


def test_the_docs_show_their_file(tmp_path: Path) -> None:
    report = read_report(DOCS / "catalogue.json")
    assert page(report) == (DOCS / "catalogue.md").read_text("utf-8")


def test_outcomes_are_kept_with_the_first_line_of_their_reasons(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    path.write_text(to_json([Result("gpt2", "tp 2", Outcome.FAILED, "an error\nand where")]), "utf-8")
    report = read_report(path)
    assert report.results == (Result("gpt2", "tp 2", Outcome.FAILED, "an error"),)
    assert set(report.versions) == {"transformers", "torch"}


def test_counts_a_picture_and_a_table(here, tmp_path: Path) -> None:
    done = here("draw", "catalogue", str(DOCS / "catalogue.json"), "-o", "all.svg", "--table", "all.md")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("dp_shard 2: ")
    assert (tmp_path / "all.md").read_text("utf-8") == (DOCS / "catalogue.md").read_text("utf-8")
    assert "qwen3" in (tmp_path / "all.svg").read_text("utf-8")


@pytest.mark.parametrize("content", [None, "{", json.dumps({"results": []})])
def test_another_file_is_refused(here, tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "other.json").write_text(content, "utf-8")
    done = here("draw", "catalogue", "other.json")
    assert done.returncode == 2 and "has no outcomes of a catalogue" in shown_error(done.stderr)["error"]
