"""`meshwright bench`: the command of the package `meshwright-bench`, or an error that says how to install it."""

from __future__ import annotations

from importlib.util import find_spec

import typer

from meshwright.cli.usage_errors import Command
from meshwright.errors import InputError


def add_bench(app: typer.Typer) -> None:
    """Add the command of `meshwright-bench` if it is installed, else one that raises an error for any arguments."""
    if find_spec("meshwright_bench") is None:
        app.command("bench", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(bench)
    else:
        from meshwright_bench.command import bench as measure

        app.command("bench", cls=Command)(measure)


def bench(context: typer.Context) -> None:
    """Measure a part of Meshwright against the obvious alternative (needs the package meshwright-bench)."""
    raise InputError(
        "the benchmarks are not installed",
        where="meshwright bench",
        rule="the benchmarks are the package meshwright-bench, in the folder bench/ of the repository",
        fix="pip install ./bench, in a clone of the repository",
    )
