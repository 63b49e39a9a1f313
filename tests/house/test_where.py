"""Rows of docs/where.md that point at nothing, and rooms without a row, are caught."""

from __future__ import annotations

import pytest

from tests.house.plant import plant
from tests.house.where import where_breaches

WHERE_HEAD = "# Where\n\n| question | file | symbol |\n|---|---|---|\n"
AXES = "class Axes:\n    pp: int = 1\n    def rank(self): ...\nNAMES = 1\nPAIR: int = 2\ndef build(): ...\n"


def where(tmp_path, *rows: str) -> list[str]:
    files = {"mesh/axes.py": AXES, "mesh/data.toml": "", "errors.py": "", "nn/__init__.py": ""}
    return where_breaches(plant(tmp_path, {**files, "docs/where.md": WHERE_HEAD + "\n".join(rows) + "\n"}))


GOOD_ROW = "| What are axes? | `src/meshwright/mesh/axes.py` | `Axes` |"


@pytest.mark.parametrize("symbol", ["Axes", "Axes.rank", "Axes.pp", "NAMES", "PAIR", "build", "build()"])
def test_where_finds_symbols(tmp_path, symbol):
    assert where(tmp_path, GOOD_ROW.replace("Axes", symbol)) == []


def test_where_takes_several_symbols_and_data_files(tmp_path):
    data = "| What is measured? | `src/meshwright/mesh/data.toml` | all of it |"
    assert where(tmp_path, GOOD_ROW.replace("`Axes`", "`Axes`, `build`"), data) == []


@pytest.mark.parametrize(
    "row, expected",
    [
        (GOOD_ROW.replace("axes.py", "axis.py"), "axis.py, which does not exist"),
        (GOOD_ROW.replace("Axes", "Axis"), "names Axis, which"),
        (GOOD_ROW.replace("Axes", "Axes.size"), "names Axes.size, which"),
        (GOOD_ROW.replace("Axes", "build.rank"), "names build.rank, which"),
        (GOOD_ROW.replace("`Axes`", "`Axes`, `gone`"), "names gone, which"),
        (GOOD_ROW.replace("`Axes`", "all of it"), "names no symbol"),
        (GOOD_ROW.replace("`src/meshwright/mesh/axes.py`", "src/meshwright/mesh/axes.py"), "is not a row"),
        (GOOD_ROW.replace("axes.py` |", "axes.py`"), "is not a row"),
        ("| A | `src/meshwright/mesh/data.toml` | `Axes` |", "which is not Python"),
    ],
)
def test_where_rows_that_point_at_nothing_are_caught(tmp_path, row, expected):
    breaches = where(tmp_path, GOOD_ROW, row)
    assert len(breaches) == 1
    assert expected in breaches[0]
    assert breaches[0].startswith("docs/where.md:6 ")


def test_where_misses_no_room(tmp_path):
    assert where(tmp_path) == ["docs/where.md has no row for the room mesh"]


def test_a_missing_where_is_caught(tmp_path):
    assert where_breaches(plant(tmp_path, {})) == ["docs/where.md is missing"]
