"""`meshwright draw`: losses of runs, redistributions, the catalogue of models, and what `draw_schedule` draws."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.draw_schedule import COMMAND_LINE, capture, pipeline
from meshwright.cli.usage_errors import Command, Commands
from meshwright.cli.wrapping import paint, show
from meshwright.errors import LayoutError, MeshwrightError
from meshwright.figure import check_figure
from meshwright.output_files import check_output, write_output
from meshwright.units import counted

if TYPE_CHECKING:
    from meshwright.reshard import Topology
    from meshwright.train.record.loss_curves import Curve

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip

app = typer.Typer(cls=Commands)
app.command("capture", cls=Command)(capture)

WINDOW_HELP = "Steps to average losses over, such as 10; by default a tenth of the shortest run, at most 20."


@app.command("catalogue", cls=Command)
def catalogue(
    report: Annotated[Path, typer.Argument(metavar="FILE.json", help="What prove --catalogue --json wrote.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write a figure, .svg or .png.")] = None,
    table: Annotated[Path | None, typer.Option("--table", help="Write a table in Markdown.")] = None,
) -> None:
    """Show which models a catalogue has proved on which layouts."""
    from meshwright.prove.catalogue import counts, draw_catalogue, page, read_report

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


@app.command("loss", cls=Command)
def loss(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders; the others are compared with the first.")
    ],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write a figure, .svg or .png.")] = None,
    window: Annotated[int | None, typer.Option(min=1, help=WINDOW_HELP)] = None,
) -> None:
    """Compare the losses of runs with those of the first run."""
    from meshwright.train.record.loss_curves import default_window, draw_losses, read_curves

    if out is not None:
        check_figure(out)
    curves = read_curves(folders)
    window = window or default_window(curves)
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


@app.command("reshard", cls=Command)
def reshard(
    source: Annotated[str, typer.Argument(metavar="FROM", help="A word per mesh axis: R replicated, S0 sharded on dim "
                                          "0, P or P(max) partial, SS0/4 strided; S0@1 S0@0 shards by the second "
                                          "axis first.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="The target layout, likewise.")],
    mesh: Annotated[str, typer.Option(help="Size of each mesh axis, such as 4,8.")],
    shape: Annotated[str, typer.Option(help="Shape of the full tensor, such as 8192,8192.")],
    dtype: Annotated[str, typer.Option(help="Data type of the tensor.")] = "bf16",
    topology: Annotated[str | None, typer.Option(metavar="PRESET", help="Cluster preset for the links of the axes; "
                                                 "without it all links are equal.")] = None,
    memory_cap: Annotated[str | None, typer.Option(help="Peak memory per rank, such as 100MB or 1.5GiB.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write a figure, .svg or .png.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON instead of a table.")] = False,
) -> None:  # fmt: skip
    """Plan the redistribution of a tensor: steps, bytes, time, memory."""
    from meshwright.mesh.layout import Layout
    from meshwright.reshard import draw_plan, explain_plan, plan

    if out is not None:
        check_figure(out)
    axis_sizes = _numbers("--mesh", mesh, "4,8", least=1)
    sizes = _numbers("--shape", shape, "8192,8192", least=0)
    layouts = []
    for name, text in (("FROM", source), ("TO", target)):
        try:
            layouts.append(Layout.parse(text, axis_sizes, sizes))
        except LayoutError as error:
            raise _located(error, f"{COMMAND_LINE}, {name}", {}) from None
    links = _topology(topology, axis_sizes)
    cap = None if memory_cap is None else _bytes(memory_cap)
    try:
        planned = plan(*layouts, dtype=dtype, topology=links, memory_cap_bytes=cap)
    except LayoutError as error:
        words = {r"dtype='(\w+)'": r"--dtype \1", r"memory_cap_bytes=(\d+)": r"--memory-cap \1"}
        option = {"dtype": "--dtype", "memory_cap_bytes": "--memory-cap"}.get(error.where, error.where)
        raise _located(error, f"{COMMAND_LINE}, {option}", words) from None
    if json:
        print(planned.to_json())
    else:
        for line in explain_plan(planned).splitlines():
            show(line)
    if out is not None:
        draw_plan(planned, str(out))
        if not json:
            show(f"figure    {out}")


def _located(error: MeshwrightError, where: str, words: dict[str, str]) -> LayoutError:
    """Return the error with its location on the command line and its fix as a command-line option."""
    fix = error.fix
    for pattern, word in words.items():
        fix = re.sub(pattern, word, fix)
    return LayoutError(error.what, where=where, rule=error.rule, fix=fix)


def _numbers(option: str, text: str, example: str, *, least: int) -> tuple[int, ...]:
    words = [word for word in re.split(r"[,x×\s]+", text.strip()) if word]
    if not words or not all(re.fullmatch(r"\d+", word) and int(word) >= least for word in words):
        raise LayoutError(
            f"{option} {text!r}",
            where=f"{COMMAND_LINE}, {option}",
            rule=f"takes integers of at least {least}, separated by commas",
            fix=f"{option} {example}",
        )
    return tuple(map(int, words))


def _topology(name: str | None, axis_sizes: tuple[int, ...]) -> Topology | None:
    from meshwright.cluster.presets import find_cluster
    from meshwright.reshard import Topology

    if name is None:
        return None
    try:
        return Topology.of(find_cluster(name), axis_sizes)
    except MeshwrightError as error:
        if error.where:  # a file
            raise
        raise _located(error, f"{COMMAND_LINE}, --topology", {r"^(\S+).*": r"--topology \1"}) from None


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise LayoutError(
            f"--memory-cap {text!r}",
            where=f"{COMMAND_LINE}, --memory-cap",
            rule="takes bytes, kB, MB, GB (powers of 1000), or KiB, MiB, GiB (powers of 1024)",
            fix="--memory-cap 100MB",
        )
    return int(float(match[1]) * unit)


app.command("pipeline", cls=Command)(pipeline)
