"""`meshwright bench`: the command of the package `meshwright-bench`, or where it is not installed, how to get it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import typer

from meshwright.errors import InputError

ANY_WORDS = {"ignore_unknown_options": True, "allow_extra_args": True}


def bench_command() -> Callable[..., Any]:
    """The command that measures, which lives beside the results in the repository's folder `bench/`."""
    if find_spec("meshwright_bench") is None:
        return bench
    from meshwright_bench.command import bench as measure

    return measure


def bench(context: typer.Context) -> None:
    """Measure a part of Meshwright against the obvious alternative (needs the package meshwright-bench)."""
    raise InputError(
        "the benchmarks are not installed",
        where="meshwright bench",
        rule="they are the package meshwright-bench, in the folder bench/ of Meshwright's repository",
        fix="pip install ./bench, in a clone of the repository",
    )
