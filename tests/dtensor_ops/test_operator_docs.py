"""The page on operators: its example prints what it shows, and its counts match the saved benchmark."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/operators.md"


def run_example(rank, world_size):
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    [shown] = re.findall(r"print\(.*\)  # (.*)", code)
    return printed.getvalue().strip() == shown


def test_the_example_prints_what_the_page_says(gang):
    assert gang(4).run(run_example) == [True] * 4


def test_the_counts_are_those_of_the_benchmark():
    figures = json.loads((ROOT / "bench/results/operators-cpu.json").read_text("utf-8"))["figures"]
    rows = re.findall(r"^\| `(dtensor|fallback)`, `(\w+)` \|(.*)\|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert len(rows) == 4
    for side, placed, cells in rows:
        assert [float(cell) for cell in cells.split("|")] == [
            figures[f"{side}.{placed}.{outcome}"]
            for outcome in ("right", "wrong", "not_implemented", "other_error", "not_a_function", "undefined_values",
                            "left_out")
        ]  # fmt: skip
