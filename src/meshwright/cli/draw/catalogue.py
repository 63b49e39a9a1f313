"""`meshwright draw catalogue`: the outcomes of `meshwright prove --catalogue` as a figure and a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.wrapping import show
from meshwright.output_files import check_output, write_output


def catalogue(
    report: Annotated[Path, typer.Argument(metavar="FILE.json", help="What prove --catalogue --json wrote.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write a figure, .svg or .png.")] = None,
    table: Annotated[Path | None, typer.Option("--table", help="Write a table in Markdown.")] = None,
) -> None:
    """Show which models a catalogue has proved on which layouts."""
    from meshwright.figure import check_figure
    from meshwright.prove.catalogue.draw import draw_catalogue
    from meshwright.prove.catalogue.layouts import counts
    from meshwright.prove.catalogue.report import page, read_report

    if out is not None:
        check_figure(out)
    if table is not None:
        check_output(table, where="--table")
    found = read_report(report)
    for line in counts(found.results):
        show(line)
    if out is not None:
        draw_catalogue(found, out)
        show(f"figure    {out}")
    if table is not None:
        write_output(table, page(found), where="--table")
        show(f"table     {table}")
