"""`meshwright draw capture`: the slots as text and picture, the plan as JSON, what the docs show, clear errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import matplotlib
import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/capture.md"
WHAT = "capture"
SIZE = ("--stages", 4, "--microbatches", 8)


def test_text_shows_each_slot(draws):
    lines = draws("1f1b", *SIZE, "--layers", 2).stdout.splitlines()
    assert lines[0] == "1f1b · rank 0 of 4 · 8 micro-batches · 2 layers"
    assert lines[1] == "0.0 F0──────B0F4────────────B4······"
    assert [line.split()[0] for line in lines[1:5]] == ["0.0", "0.1", "0.2", "0.3"]
    assert lines[5] == "graphs          16 · 4 slots · 4 memory pools · 32 if each micro-batch had its own"
    assert lines[6].startswith("static tensors  ") and len(lines) == 7


def test_text_fits_the_terminal(draws):
    words = ("interleaved", "--stages", 4, "--microbatches", 16, "--layers", "2,1", "--rank", 1)
    lines = draws(*words, COLUMNS="60").stdout.splitlines()
    rows = [line for line in lines if re.match(r" *\d\.\d", line)]
    assert rows and max(map(len, rows)) <= 60 and {len(row) for row in rows} == {len(rows[0])}


def test_the_plan_is_written(draws, tmp_path):
    done = draws("zb-v", *SIZE, "--mode", "per_microbatch", "--json", "plan.json")
    plan = json.loads((tmp_path / "plan.json").read_text("utf-8"))
    assert plan["mode"] == "per_microbatch" and len(plan["graphs"]) == 2 * 3 * 8 - sum(
        event["kind"] == "B" for event in plan["events"]
    )
    assert "plan            plan.json" in done.stdout and "if each micro-batch" not in done.stdout


def test_the_docs_show_what_the_command_prints(draws, tmp_path):
    blocks = re.findall(r"```\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    at = next(at for at, block in enumerate(blocks) if block.startswith("meshwright draw capture"))
    command, shown = blocks[at : at + 2]
    drawn = draws(*command.split()[3:]).stdout
    assert [line.rstrip() for line in drawn.splitlines()] == shown.splitlines()
    picture = next(tmp_path.glob("*.svg")).read_text("utf-8")
    committed = (ROOT / "docs/capture/zb-v.svg").read_text("utf-8")
    if f"Matplotlib v{matplotlib.__version__}," in committed:
        assert picture == committed, command
    else:  # another version may write the same picture in other words
        boxes = [re.findall(r'id="(rank\d+-\w+)"', text) for text in (committed, picture)]
        assert boxes[0] == boxes[1] != []


@pytest.mark.parametrize(
    "words, what",
    [
        (("1f1b", *SIZE, "--layers", "x"), "--layers x"),
        (("1f1b", *SIZE, "--layers", "2,3"), "layers_per_chunk = (2, 3)"),
        (("1f1b", *SIZE, "--rank", 4), "rank 4 of a table with 4 rows"),
        (("1f1b", *SIZE, "--mode", "all"), "'all' is not one of"),
        (("1f1b", *SIZE, "-o", "a.gif"), "a.gif"),
        (("1f1b",), "needs the number of stages"),
    ],
)
def test_bad_input_is_named(fails, words, what):
    assert what in " ".join(fails(*words).values())
