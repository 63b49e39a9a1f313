"""Breaches of style are caught."""

from __future__ import annotations

import pytest

from tests.house.plant import plant
from tests.house.style import style_breaches

DOC = '"""What it is."""\n'
STYLE = {
    "long file": ("mesh/a.py", DOC + "x = 1\n" * 600, "is 601 lines long"),
    "long function": ("mesh/a.py", DOC + "def f():\n" + "    x = 1\n" * 60, "f is 61 lines long"),
    "long method": (
        "mesh/a.py",
        DOC + "class A:\n  async def g(self):\n" + "    x = 1\n" * 60,
        "g is 61 lines",
    ),
    "long test": ("tests/test_a.py", "def test_f():\n" + "    x = 1\n" * 80, "test_f is 81 lines long"),
    "global": ("mesh/a.py", DOC + "def f():\n    global x, y\n", "has `global x, y`"),
    "global in a test": ("tests/test_a.py", "def f():\n    global x\n", "has `global x`"),
    "print": ("mesh/a.py", DOC + "def f():\n    print('x')\n", ":3 calls print"),
    "no docstring": ("mesh/a.py", "x = 1\n", "no module docstring"),
    "no docstring in an init": ("mesh/__init__.py", "", "no module docstring"),
    "a comment is no docstring": ("mesh/a.py", "# What it is.\nx = 1\n", "no module docstring"),
    "open end": ("mesh/a.py", DOC + "x = 1  # TODO: later\n", ":2 leaves an open end"),
    "other open end": ("mesh/a.py", DOC + "# FIXME\n", ":2 leaves an open end"),
}


@pytest.mark.parametrize("path, text, expected", STYLE.values(), ids=STYLE)
def test_style_breaches_are_caught(tmp_path, path, text, expected):
    breaches = style_breaches(plant(tmp_path, {path: text}))
    assert len(breaches) == 1
    assert expected in breaches[0]


def test_what_the_style_allows(tmp_path):
    files = {
        "mesh/a.py": DOC + "def f():\n" + "    x = 1\n" * 59 + "y = 1\n" * 339,
        "mesh/_private.py": "x = 1\n",
        "cli/main.py": DOC + "print('x')\n",
        "mesh/b.py": DOC + "# TODO(#12): wait for the next release\n# see https://x.org/1 TODO\nt = 'TODO'\n",
        "tests/test_a.py": "print('x')\n",
    }
    assert style_breaches(plant(tmp_path, files)) == []
