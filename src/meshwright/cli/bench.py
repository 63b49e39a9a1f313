"""`meshwright bench`: the `meshwright-bench` package's command, or an error with install instructions."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import typer

from meshwright.errors import InputError

ANY_WORDS = {"ignore_unknown_options": True, "allow_extra_args": True}


def bench_command() -> Callable[..., Any]:
    """Return the `meshwright-bench` command if the package is installed, otherwise one that raises an error."""
    if find_spec("meshwright_bench") is None:
        return bench
    from meshwright_bench.command import bench as measure

    return measure


def bench(context: typer.Context) -> None:
    """Measure a part of Meshwright against the obvious alternative (needs the package meshwright-bench)."""
    raise InputError(
        "the benchmarks are not installed",
        where="meshwright bench",
        rule="the benchmarks are the package meshwright-bench, in the folder bench/ of the repository",
        fix="pip install ./bench, in a clone of the repository",
    )
