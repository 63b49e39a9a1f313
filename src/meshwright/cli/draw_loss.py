"""`meshwright draw loss`: compare the losses of several runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.colors import paint


def loss(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders; the others are compared with the first.")
    ],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write a figure, .svg or .png.")] = None,
    window: Annotated[int, typer.Option(min=1, help="Steps over which differences are averaged.")] = 20,
) -> None:
    """Compare the losses of runs with those of the first run."""
    from meshwright.figure import check_figure
    from meshwright.train.record.draw_loss_curves import differences, draw_losses
    from meshwright.train.record.loss_curves import read_curves

    if out is not None:
        check_figure(out)
    curves = read_curves(folders)
    width = max(len(curve.name) for curve in curves)
    for curve in curves:
        last = min(window, len(curve.losses))
        words = f"loss {sum(curve.losses[-last:]) / last:.4f} (mean of the last {last} of {len(curve.steps)} steps)"
        if curve.validation is not None:
            words += f" · validation {curve.validation:.4f}"
        if curve is not curves[0] and (apart := differences(curve, curves[0], window=last)[1]):
            words += f" · {apart[-1]:+.2%} relative to the first"
        print(f"{paint(curve.name.ljust(width), 'bold', sys.stdout)}  {words}")
    if out is not None:
        title = f"Losses of {len(curves)} runs\nabove: loss; below: difference to {curves[0].name}"
        draw_losses(curves, out, title=title, window=window)
        print(f"figure    {out}")
