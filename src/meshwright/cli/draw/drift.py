"""`meshwright draw drift`: compare replicas of shared parameters with and without gradient summation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.colors import paint
from meshwright.cli.config_arguments import split_words
from meshwright.cli.wrapping import show
from meshwright.errors import InputError
from meshwright.units import counted

if TYPE_CHECKING:
    from meshwright.prove.drift.result import DriftCurve, DriftResult

WORDS_HELP = "A preset or a TOML file, then section.key=value …; default: dit-digits mesh.pp=2 pipeline.chunks=2."


def drift(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[PRESET|FILE.toml] [KEY=VALUE]...", help=WORDS_HELP)
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps in each of the two runs.")] = 30,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write a figure, .svg or .png.")] = None,
) -> None:
    """Train with and without summing the gradients of shared parameters, and show how their replicas drift apart."""
    from meshwright.figure import check_figure
    from meshwright.plan.make_plan import make_plan
    from meshwright.prove.drift.experiment import load_sharing, measure_drift
    from meshwright.train.launch.launcher import context_from_environment

    if context_from_environment() is not None:
        raise InputError(
            "draw was started by a launcher",
            where="WORLD_SIZE in the environment",
            rule="draw drift starts its own processes on this machine",
            fix="the same command without torchrun",
        )
    if out is not None:
        check_figure(out)
    config = load_sharing(*split_words(words))
    stages = counted(len(make_plan(config).stages), "stage")
    facts = f"{config.name} · {config.mesh.axes()} · {stages} · {counted(steps, 'step')}"
    _say(f"{facts}, two runs …")
    result = measure_drift(config, num_steps=steps)
    _say("")
    for label, curve in (("with the sum", result.synced), ("without it", result.unsynced)):
        show(f"{paint(label.ljust(12), 'bold', sys.stdout)}  {_summary(curve, result)}", more=" " * 14)
    if out is not None:
        from meshwright.prove.drift.draw import draw_drift

        title = f"Replicas of shared parameters with and without summed gradients\n{facts}"
        draw_drift(result, out, title=title)
        show(f"figure    {out}")


def _summary(curve: DriftCurve, drift: DriftResult) -> str:
    first = next((step for step, apart in enumerate(curve.distances, start=1) if apart > 0), None)
    if first is None:
        replicas = f"replicas bitwise equal after all {counted(len(curve.distances), 'step')}"
    else:
        replicas = f"replicas differ from step {first} on, by {curve.distances[-1]:.2%} after {len(curve.distances)}"
    return f"{replicas} · loss {curve.losses[0]:.4f} → {curve.losses[-1]:.4f} {drift.loss_unit}"


def _say(text: str) -> None:
    """Show the reason for a wait, on terminals only; the next call overwrites it."""
    if sys.stderr.isatty():
        print("\r\x1b[2K" + text, end="", file=sys.stderr, flush=True)
