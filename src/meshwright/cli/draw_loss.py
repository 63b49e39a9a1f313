"""`meshwright draw loss`: what runs lost, beside each other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.colors import paint


def loss(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; the first is compared with.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write a picture, .svg or .png.")] = None,
    window: Annotated[int, typer.Option(min=1, help="Steps that differences are a mean over.")] = 20,
) -> None:
    """Compare the losses of runs with those of the first."""
    from meshwright.figure import check_picture
    from meshwright.train.record.draw_loss_curves import differences, draw_losses
    from meshwright.train.record.loss_curves import read_curves

    if out is not None:
        check_picture(out)
    curves = read_curves(folders)
    width = max(len(curve.name) for curve in curves)
    for curve in curves:
        last = min(window, len(curve.losses))
        words = f"loss {sum(curve.losses[-last:]) / last:.4f} (mean of the last {last} of {len(curve.steps)} steps)"
        if curve.validation is not None:
            words += f" · validation {curve.validation:.4f}"
        if curve is not curves[0] and (apart := differences(curve, curves[0], window=last)[1]):
            words += f" · {apart[-1]:+.2%} of the first's"
        print(f"{paint(curve.name.ljust(width), 'bold', sys.stdout)}  {words}")
    if out is not None:
        title = f"Losses of {len(curves)} runs\nabove as they are, below how far they are from {curves[0].name}"
        draw_losses(curves, out, title=title, window=window)
        print(f"picture   {out}")
