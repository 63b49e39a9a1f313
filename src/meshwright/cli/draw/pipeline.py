"""`meshwright draw pipeline`: a schedule's timeline as text, figure and table. Also defines the `draw` group."""

from __future__ import annotations

import math
import re
import shutil
import sys
from pathlib import Path
from typing import Annotated, TextIO

import typer

from meshwright.cli.draw.capture import capture
from meshwright.cli.draw.catalogue import catalogue
from meshwright.cli.draw.loss import loss
from meshwright.cli.draw.reshard import reshard
from meshwright.cli.schedule_argument import COMMAND_LINE, SCHEDULE_HELP, load_schedule
from meshwright.cli.unknown_words import Commands
from meshwright.cli.usage_errors import Command
from meshwright.cli.wrapping import paint, show
from meshwright.errors import InputError
from meshwright.figure import check_figure
from meshwright.output_files import check_output, write_output
from meshwright.pipeline import Costs, EdgeCosts, Schedule, lower, simulate
from meshwright.pipeline.actions import ActionKind
from meshwright.pipeline.draw import draw, text_timeline
from meshwright.pipeline.lower import num_slots
from meshwright.pipeline.simulate import Simulation
from meshwright.units import counted

HELP = "Draw schedules, CUDA graphs, redistributions, losses and the catalogue of models."
app = typer.Typer(cls=Commands, help=HELP, no_args_is_help=True)
app.command("capture", cls=Command)(capture)
app.command("catalogue", cls=Command)(catalogue)
app.command("loss", cls=Command)(loss)
app.command("reshard", cls=Command)(reshard)

OFF_TERMINAL_COLUMNS = 100
BOX = re.compile(r"([FBIW])\1*[0-9 ]*|(·)+", re.IGNORECASE)
STYLES = {"F": "bold", "B": "green", "I": "green", "W": "yellow", "·": "dim"}

Time = Annotated[float, typer.Option(help="Time per stage and micro-batch; each chunk is a stage.")]
TableFile = Annotated[str | None, typer.Option(metavar="FILE", help="Write the table; - for stdout.")]


@app.command("pipeline", cls=Command)
def pipeline(
    source: Annotated[str, typer.Argument(metavar="SCHEDULE", help=SCHEDULE_HELP)],
    stages: Annotated[int | None, typer.Option(help="Pipeline ranks, such as 4.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Micro-batches per step, such as 8.")] = None,
    chunks: Annotated[int | None, typer.Option(help="Chunks (stages) per rank, such as 2.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write a figure, .svg or .png.")] = None,
    table: Annotated[bool, typer.Option("--simulate", help="Print bubble, peak and buffers per rank.")] = False,
    forward: Time = 1.0,
    backward_input: Time = 1.0,
    backward_weight: Time = 1.0,
    latency: Annotated[float, typer.Option(help="Latency of a transfer between adjacent stages.")] = 0.0,
    csv: TableFile = None,
    json: TableFile = None,
) -> None:
    """Draw a pipeline schedule: F forward, B backward, I input gradient, W weight gradient, · idle.

    A letter's number is the micro-batch; lower case is the rank's second chunk.
    """
    if csv == json == "-":
        raise InputError(
            "--csv - and --json - both write to stdout",
            where=COMMAND_LINE,
            rule="one of them at a time",
            fix="--csv - alone, or a file name for one of them",
        )
    if out is not None:
        check_figure(out)
    for name in (csv, json):
        if name is not None and name != "-":
            check_output(Path(name), where=name)
    costs = _costs(
        {"forward": forward, "backward-input": backward_input, "backward-weight": backward_weight, "latency": latency}
    )
    schedule = load_schedule(source, stages, microbatches, chunks, command="draw pipeline")
    simulation = simulate(schedule, costs)
    screen = sys.stderr if "-" in (csv, json) else sys.stdout
    title = _title(schedule, simulation)
    _print_timeline(schedule, simulation, title, screen)
    if table:
        _print_table(schedule, simulation, screen)
    for name, text in ((csv, Schedule.to_csv), (json, Schedule.to_json)):
        if name is not None:
            _write(name, text(schedule), screen)
    if out is not None:
        draw(simulation, out, title=title, schedule=schedule)
        show(f"figure    {out}", screen)


def _costs(times: dict[str, float]) -> Costs:
    for name, time in times.items():
        if not math.isfinite(time) or time < 0 or (time == 0 and name != "latency"):
            least = "zero or more" if name == "latency" else "more than zero"
            raise InputError(
                f"--{name} {time:g}",
                where=f"{COMMAND_LINE}, --{name}",
                rule=f"times are {least}, in any unit",
                fix=f"--{name} {0 if name == 'latency' else 1}",
            )
    forward, backward_input, backward_weight, latency = times.values()
    return Costs.uniform(
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
        activation_bytes=1,  # makes peak memory a count of micro-batches
        edge=EdgeCosts(latency),
    )


def _title(schedule: Schedule, simulation: Simulation) -> str:
    """Return a two-line title: the name, then the size and costs."""
    parts = [counted(schedule.num_ranks, "rank"), counted(schedule.num_microbatches, "micro-batch")]
    if schedule.num_chunks > 1:
        parts.append(counted(schedule.num_chunks, "chunk"))
    peak = max(_peak(schedule, simulation, rank) for rank in range(schedule.num_ranks))
    parts += [f"bubble {simulation.bubble():.1%}", f"peak {peak:.4g} micro-batches"]
    return f"{schedule.kind}\n{' · '.join(parts)}"


def _peak(schedule: Schedule, simulation: Simulation, rank: int) -> float:
    """Return a rank's peak activation memory, in micro-batches, over all its chunks."""
    return simulation.peak_bytes[rank].total / max(1, len(schedule.stages_of(rank)))


def _print_timeline(schedule: Schedule, simulation: Simulation, title: str, screen: TextIO) -> None:
    name, _, facts = title.partition("\n")
    show(f"{paint(name, 'bold', screen)} · {facts}", screen)
    columns = shutil.get_terminal_size((OFF_TERMINAL_COLUMNS, 24)).columns
    text = text_timeline(simulation.timeline, columns=columns)
    print(BOX.sub(lambda box: paint(box[0], STYLES[box[0][0].upper()], screen), text), file=screen)
    in_span = max(idle.in_span for idle in simulation.idle)
    in_makespan = max(idle.in_makespan for idle in simulation.idle)
    show(
        f"makespan {simulation.makespan:.6g} · idle on the worst rank: {in_span:.6g} within its span, "
        f"{in_makespan:.6g} of the makespan",
        screen,
    )


def _print_table(schedule: Schedule, simulation: Simulation, screen: TextIO) -> None:
    lowered = schedule if schedule.is_lowered else lower(schedule)
    print("rank      busy  idle in span  idle in makespan      peak  receive slots F  B", file=screen)
    for rank, (busy, idle) in enumerate(zip(simulation.busy, simulation.idle, strict=True)):
        slots = num_slots(lowered, rank)
        print(
            f"{rank:>4}  {busy:>8.6g}  {idle.in_span:>12.6g}  {idle.in_makespan:>16.6g}  "
            f"{_peak(schedule, simulation, rank):>8.4g}  {slots[ActionKind.RECV_FORWARD]:>15} "
            f"{slots[ActionKind.RECV_BACKWARD]:>2}",
            file=screen,
        )


def _write(name: str, text: str, screen: TextIO) -> None:
    if name == "-":
        print(text.rstrip("\n"))
        return
    write_output(Path(name), text, where=name)
    show(f"table     {name}", screen)
