"""The parameters in docs/step-time.md are those that were fitted, each once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshwright_bench.published.programs import PROGRAMS, fitted

PAGE = (Path(__file__).parents[2] / "docs/step-time.md").read_text("utf-8")
ROW = re.compile(r"^\| `?([\w-]+)`? \| `([\w.]+)` \| ([\d.]+)( TFLOP/s| MB)? \|", re.MULTILINE)
FACTORS = {" TFLOP/s": 1e12, " MB": 1e6, "": 1.0}


def shown(text: str) -> dict[str, tuple[float, float]]:
    """Return each parameter's value in a page, with its precision."""
    found = {}
    for owner, name, value, unit in ROW.findall(text):
        digits = len(value.partition(".")[2])
        found[f"{owner}/{name.replace('.', '/')}"] = (
            float(value) * FACTORS[unit],
            0.5001 * 10**-digits * FACTORS[unit],
        )
    return found


def stale(text: str) -> set[str]:
    """Return the parameters that a page lacks, has too many of, or has with another value."""
    found, expected = shown(text), fitted()
    return {
        path
        for path in found.keys() | expected.keys()
        if path not in found or path not in expected or abs(found[path][0] - expected[path]) > found[path][1]
    }


def test_the_page_lists_what_was_fitted():
    assert stale(PAGE) == set()
    assert all(f"`{name}`" in PAGE or f"`{name.removeprefix('torchtitan')}`" in PAGE for name in PROGRAMS)


@pytest.mark.parametrize(("old", "new"), [(" TFLOP/s |", " MB |"), ("| tcpx |", "| tcpy |")])
def test_a_stale_page_is_found(old, new):
    assert old in PAGE
    assert stale(PAGE.replace(old, new, 1))
