"""`meshwright draw loss`: compare the losses of several runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.wrapping import paint, show
from meshwright.units import counted

if TYPE_CHECKING:
    from meshwright.train.record.loss_curves import Curve


MAX_WINDOW = 20
WINDOW_HELP = f"Steps to average losses over, such as 10; by default a tenth of the shortest run, at most {MAX_WINDOW}."


def loss(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders; the others are compared with the first.")
    ],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write a figure, .svg or .png.")] = None,
    window: Annotated[int | None, typer.Option(min=1, help=WINDOW_HELP)] = None,
) -> None:
    """Compare the losses of runs with those of the first run."""
    from meshwright.figure import check_figure
    from meshwright.train.record.loss_curves import draw_losses, read_curves

    if out is not None:
        check_figure(out)
    curves = read_curves(folders)
    window = window or max(1, min(MAX_WINDOW, min(len(curve.steps) for curve in curves) // 10))
    for curve in curves:
        show(paint(curve.name, "bold", sys.stdout))
        show(f"  {_own_loss(curve, window)}")
        if curve is not curves[0]:
            show(f"  {_difference(curve, curves[0], window)}")
    if out is not None:
        draw_losses(curves, out, title=_title(curves, window), window=window)
        show(f"figure    {out}")


def _own_loss(curve: Curve, window: int) -> str:
    losses, unit = curve.losses[-window:], f" {curve.unit}" if curve.unit else ""
    words = f"loss {sum(losses) / len(losses):.4f}{unit} · {_over(curve.steps[-window:])}"
    return words if curve.validation is None else f"{words} · validation {curve.validation:.4f}"


def _difference(curve: Curve, first: Curve, window: int) -> str:
    from meshwright.train.record.loss_curves import common_steps, differences

    steps = common_steps(curve, first)
    if not steps:
        return "no step in common with the first run"
    common = "" if curve.steps == first.steps else "common "
    apart = differences(curve, first, window=window)[1][-1]
    return f"{apart:+.2%} relative to the first run · {_over(steps[-window:], common)}"


def _over(steps: Sequence[int], common: str = "") -> str:
    """Describe the steps over which a mean was taken."""
    return f"{common}step {steps[0]}" if len(steps) == 1 else f"mean of {common}steps {steps[0]} … {steps[-1]}"


def _title(curves: Sequence[Curve], window: int) -> str:
    if len(curves) == 1:
        return f"Loss of {curves[0].name}"
    unit = f" in {curves[0].unit}" if curves[0].unit else ""
    common = " at common steps" if len({curve.steps for curve in curves}) > 1 else ""
    mean = f", mean of {window} steps" if window > 1 else ""
    below = f"difference relative to the first run{common}{mean}"
    return f"Losses of {counted(len(curves), 'run')}\nabove: loss{unit}; below: {below}"
