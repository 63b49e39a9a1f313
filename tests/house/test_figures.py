"""Rooms that are too full, functions that are too long on the whole and circles of imports are caught."""

from __future__ import annotations

import pytest

from tests.house.figures import MAX_FILES, MAX_MEDIAN_LINES, figure_breaches
from tests.house.plant import plant

A, B = "from meshwright.mesh.b import x", "from meshwright.mesh.a import y"
CYCLES = {
    "plain": {"mesh/a.py": A, "mesh/b.py": B},
    "in a function": {"mesh/a.py": A, "mesh/b.py": f"def f():\n    {B}"},
    "for types": {"mesh/a.py": A, "mesh/b.py": f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {B}"},
    "of three": {"mesh/a.py": A, "mesh/b.py": "import meshwright.nn.c", "nn/c.py": B},
    "through a package": {
        "mesh/a.py": "from meshwright.nn import x",
        "nn/__init__.py": "from meshwright.mesh.a import x",
    },
}


@pytest.mark.parametrize("files", CYCLES.values(), ids=CYCLES)
def test_cycles_are_caught(tmp_path, files):
    (breach,) = figure_breaches(plant(tmp_path, files))
    assert breach.startswith("import cycle: meshwright.")


def test_a_chain_is_no_cycle(tmp_path):
    assert not figure_breaches(plant(tmp_path, {"mesh/a.py": A, "mesh/b.py": "import meshwright.nn.c", "nn/c.py": ""}))


def test_a_folder_too_full_is_caught(tmp_path):
    files = {f"mesh/a{number}.py": "" for number in range(MAX_FILES)}
    assert not figure_breaches(plant(tmp_path, files))
    (breach,) = figure_breaches(plant(tmp_path, {**files, "mesh/one_more.py": ""}))
    assert breach.startswith(f"src/meshwright/mesh has {MAX_FILES + 1} files")


def test_functions_too_long_on_the_whole_are_caught(tmp_path):
    body = "    x = 1\n" * MAX_MEDIAN_LINES
    short, long = "def f(): ...\n", f"def g():\n{body}"
    assert not figure_breaches(plant(tmp_path, {"mesh/a.py": short * 2 + long}))
    (breach,) = figure_breaches(plant(tmp_path, {"mesh/a.py": short + long * 2}))
    assert breach.startswith("half of all functions have over 9 lines")
