"""Measured figures in docs/benchmarks.md are those of the JSON that the command beside them wrote, and those in
docs/gpu.md of the JSON that they name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"^`meshwright bench [\w-]+ .*--json (bench/results/[\w-]+\.json)`", re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?![\w.])")
TARGET = re.compile(r"[≤≥=] ?[\d.]+|\([^)]*(?:target|of \d)[^)]*\)")
UNITS = (1, 100, 1e3, 1e6, 1e-3, 1e-6, 1e-9, 2**-10, 2**-20, 2**-30)
"""Factors between a figure and what a table shows: percent, and larger or smaller units."""


def results(text: str) -> dict[str, str]:
    """Return the text after each command with results, up to the next one, by the path of its JSON."""
    found = list(COMMAND.finditer(text))
    ends = [*(one.start() for one in found[1:]), len(text)]
    return {one[1]: text[one.end() : end].partition("\n## ")[0] for one, end in zip(found, ends, strict=True)}


def table_numbers(text: str) -> Iterator[tuple[str, str]]:
    """Yield each number of two digits or more in a table, and its row; without targets and first cells."""
    for row in re.findall(r"^\|(?!-|.*\n\|-).*\|$", text, re.MULTILINE):
        for number in NUMBER.findall(TARGET.sub("", row.split("|", 2)[2])):
            if len(re.sub(r"\D", "", number)) > 1:
                yield number, row


def is_rounding_of_one(number: str, figures: list[float]) -> bool:
    """Return whether the number is a figure in one of the units, or a ratio's excess over 1 in percent, rounded."""
    value, digits = float(number.replace(",", "")), len(number.partition(".")[2])
    shown = [abs(one) for figure in figures for one in (*(figure * unit for unit in UNITS), 100 * (figure - 1))]
    return any(abs(one - value) <= 0.5001 * 10**-digits for one in shown)


def unmatched(text: str, figures: list[float]) -> list[str]:
    return [f"{number} in {row}" for number, row in table_numbers(text) if not is_rounding_of_one(number, figures)]


def numbers_in(value: object) -> Iterator[float]:
    if isinstance(value, dict):
        for one in value.values():
            yield from numbers_in(one)
    elif isinstance(value, int | float):
        yield float(value)


PAGE = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
RESULTS = {path: text for path, text in results(PAGE).items() if (ROOT / path).is_file()}


@pytest.mark.parametrize("path", RESULTS)
def test_tables_show_what_was_measured(path):
    found = json.loads((ROOT / path).read_text("utf-8"))
    assert unmatched(RESULTS[path], list(numbers_in(found["figures"]))) == []
    assert found["date"][:10] in RESULTS[path]
    assert found["versions"]["torch"].partition("+")[0] in RESULTS[path]


def test_every_committed_result_is_shown():
    assert sorted(RESULTS) == sorted(f"bench/results/{one.name}" for one in (ROOT / "bench/results").glob("*.json"))


def cells_on_gpus(text: str) -> list[str]:
    """Return the cells of what was measured in the page on GPUs."""
    table = text.partition("| measured |")[2].partition("\n\n")[0]
    return [row.rstrip(" |").rpartition("|")[2] for row in table.splitlines()[2:]]


def unfounded(cell: str) -> list[str]:
    """Return the numbers of a cell that are in no file that it names; all of it, if it names none but is measured."""
    files = re.findall(r"`([\w-]+\.json)`", cell)
    if not files:
        return [] if cell.strip() == "unmeasured" else [cell]
    figures = [
        one for file in files for one in numbers_in(json.loads((ROOT / "bench/results" / file).read_text("utf-8")))
    ]
    return unmatched(f"| |\n|---|\n| a | {cell} |\n", figures)


@pytest.mark.parametrize("cell", cells_on_gpus((ROOT / "docs" / "gpu.md").read_text("utf-8")))
def test_the_page_on_gpus_shows_what_the_file_beside_a_figure_has(cell):
    assert unfounded(cell) == []


@pytest.mark.parametrize(("cell", "is_right"), [
    ("unmeasured", True), ("twice as fast", False), ("74,514 (`train-cuda.json`)", True),
    ("74,515 (`train-cuda.json`)", False),
])  # fmt: skip
def test_a_figure_without_its_file_is_found(cell, is_right):
    assert (unfounded(cell) == []) is is_right
    assert cells_on_gpus(f"| a | measured |\n|---|---|\n| b | {cell} |\n\n| c | 5 |\n") == [f" {cell}"]


@pytest.mark.parametrize(("cell", "is_right"), [
    ("0.977", True), ("0.978", False), ("17,139", True), ("17,138", False), ("97.7", True), ("1.99", True),
    ("2.00", False), ("2.65 MiB", True), ("2.64 MiB", False), ("≥ 0.97", True), ("met; 1.98", False),
])  # fmt: skip
def test_a_stale_figure_is_found(cell, is_right):
    text = f"| figure | value |\n|---|---|\n| `a.12` | {cell} |\n"
    assert (unmatched(text, [0.9772, 17_139.4, 1.994, 2_778_000.0]) == []) is is_right
