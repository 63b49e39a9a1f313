"""`meshwright report`: write the report of one run, or of several compared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders; several are compared with the first.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="FILE", help="The page to write; default: report.html in the folder of the only run."
        ),
    ] = None,
) -> None:
    """Write a page on a run, or a comparison of several, that opens in any browser without a network."""
    from meshwright.errors import InputError
    from meshwright.output_files import check_output, write_output
    from meshwright.train.record.record_files import REPORT
    from meshwright.train.report import page

    if out is None and len(folders) > 1:
        raise InputError(
            f"no file for the comparison of {len(folders)} runs",
            where="command line, -o",
            rule="the report of a run goes into its folder; a comparison needs a name",
            fix="-o comparison.html",
        )
    text = page.report(folders)
    path = out or folders[0] / REPORT
    check_output(path, where=str(path))
    write_output(path, text, where=str(path))
    print(f"report  {path}")
