"""`meshwright draw pipeline` and `capture`: a schedule's timeline, and the CUDA graphs of a rank that runs it."""

from __future__ import annotations

import difflib
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Annotated, TextIO

import typer

from meshwright.capture import CapturePlan, LayerSignature, TensorSignature, plan_capture, verify_capture
from meshwright.capture.draw import draw_capture, slot_text
from meshwright.capture.plan import CaptureMode
from meshwright.cli.wrapping import paint, show
from meshwright.errors import InputError, ScheduleError
from meshwright.figure import check_figure
from meshwright.output_files import check_output, write_output
from meshwright.pipeline import Costs, EdgeCosts, Schedule, generate, lower, simulate, verify
from meshwright.pipeline.actions import ActionKind
from meshwright.pipeline.draw import draw, text_timeline
from meshwright.pipeline.generate import ScheduleKind
from meshwright.pipeline.lower import num_slots
from meshwright.pipeline.simulate import Simulation
from meshwright.units import counted

COMMAND_LINE = "command line"
A_TABLE = "create one to start from: meshwright draw pipeline 1f1b --stages 4 --microbatches 8 --csv mine.csv"
SCHEDULE_HELP = f"{', '.join(kind.value for kind in ScheduleKind)}, or a table's file (.csv, .json)."
OFF_TERMINAL_COLUMNS = 100
BOX = re.compile(r"([FBIW])\1*[0-9 ]*|(·)+", re.IGNORECASE)
STYLES = {"F": "bold", "B": "green", "I": "green", "W": "yellow", "·": "dim"}

Time = Annotated[float, typer.Option(help="Time per stage and micro-batch; each chunk is a stage.")]
TableFile = Annotated[str | None, typer.Option(metavar="FILE", help="Write the table; - for stdout.")]


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


def capture(
    source: Annotated[str, typer.Argument(metavar="SCHEDULE", help=SCHEDULE_HELP)],
    stages: Annotated[int | None, typer.Option(help="Pipeline ranks, such as 4.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Micro-batches per step, such as 8.")] = None,
    chunks: Annotated[int | None, typer.Option(help="Chunks (stages) per rank, such as 2.")] = None,
    rank: Annotated[int, typer.Option(min=0, help="Pipeline rank.")] = 0,
    layers: Annotated[str, typer.Option(help="Layers of each chunk of the rank: 8, or 4,3.")] = "1",
    mode: Annotated[CaptureMode, typer.Option(help="Graphs per slot, or per micro-batch.")] = CaptureMode.SLOT,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write a figure, .svg or .png.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan.")] = None,
) -> None:
    """Draw the slots of a rank's CUDA graphs: ─ while a micro-batch waits for its backward, · while a slot is free.

    All layers are taken to have the same shape.
    """
    if out is not None:
        check_figure(out)
    if json is not None:
        check_output(json, where=str(json))
    schedule = lower(load_schedule(source, stages, microbatches, chunks, command="draw capture"))
    plan, apart = (_plan(schedule, rank, layers, mode, reuse=reuse) for reuse in (True, False))
    verify_capture(plan)
    own = [str(len(layers)) for _, layers in plan.chunks]
    shown = counted(schedule.num_microbatches, "micro-batch")
    facts = f"rank {rank} of {schedule.num_ranks} · {shown} · {' + '.join(own)} layer{'s' * (own != ['1'])}"
    show(f"{paint(schedule.kind, 'bold', sys.stdout)} · {facts}")
    print(slot_text(plan, columns=shutil.get_terminal_size((OFF_TERMINAL_COLUMNS, 24)).columns))
    each = sum(event.layer is not None for event in plan.events)
    slots = sum(plan.num_slots(stage) for stage, _ in plan.slots)
    parts = [str(len(plan.graphs)), counted(slots, "slot"), counted(plan.num_pools, "memory pool")]
    if len(plan.graphs) < each:
        parts.append(f"{each} if each micro-batch had its own")
    show(f"graphs          {' · '.join(parts)}", more=" " * 16)
    show(f"static tensors  {len(plan.buffers)} of a layer's size, {len(apart.buffers)} if none shared memory")
    if json is not None:
        write_output(json, plan.to_json() + "\n", where=str(json))
        show(f"plan            {json}")
    if out is not None:
        draw_capture(
            plan, out, title=f"{schedule.kind}: slots of CUDA graphs\n{facts} · {counted(len(plan.graphs), 'graph')}"
        )
        show(f"figure          {out}")


def _plan(schedule: Schedule, rank: int, layers: str, mode: CaptureMode, *, reuse: bool) -> CapturePlan:
    stream = TensorSignature((1,))
    return plan_capture(
        schedule,
        rank=rank,
        layers_per_chunk=_layers(layers),
        signatures=LayerSignature(stream, stream),
        mode=mode,
        reuse_io=reuse,
        reuse_grad_outputs=reuse,
    )


def _layers(text: str) -> int | tuple[int, ...]:
    numbers = text.split(",")
    if not all(number.strip().isascii() and number.strip().isdigit() for number in numbers):
        raise InputError(
            f"--layers {text}",
            where=f"{COMMAND_LINE}, --layers",
            rule="the number of captured layers of each chunk, or one number per chunk of the rank",
            fix="--layers 8, or --layers 4,3",
        )
    found = tuple(map(int, numbers))
    return found[0] if len(found) == 1 else found


def load_schedule(
    source: str, stages: int | None, microbatches: int | None, chunks: int | None, *, command: str
) -> Schedule:
    """Generate the named schedule, or read one from a file and verify it; `command` is named in errors.

    Raises:
        ScheduleError: the schedule is unknown, lacks a number, or differs from the file.
        InputError: the file can't be read.
    """
    if "/" in source or source.endswith((".csv", ".json")):
        schedule = _read(Path(source))
        asked = (("stages", stages, schedule.num_ranks, "ranks"),
                 ("microbatches", microbatches, schedule.num_microbatches, "micro-batches"),
                 ("chunks", chunks, schedule.num_chunks, "chunks"))  # fmt: skip
        for option, wanted, actual, name in asked:
            if wanted not in (None, actual):
                raise ScheduleError(
                    f"{source} has {actual} {name}, not {wanted}",
                    where=source,
                    rule=f"--{option} must match the file",
                    fix=f"--{option} {actual}, or leave it out",
                )
        return schedule
    name = source.lower().replace("_", "-")
    names = [kind.value for kind in ScheduleKind]
    if name not in names:
        from meshwright.config.translate import value_named

        near = value_named("pipeline.schedule", source) or next(
            iter(difflib.get_close_matches(name, names, n=1, cutoff=0.3)), "1f1b"
        )
        raise ScheduleError(
            f"unknown schedule {source!r}",
            where=COMMAND_LINE,
            rule=f"schedules are {', '.join(names)}; a file name has a / or ends with .csv or .json",
            fix=near,
        )
    if stages is None or microbatches is None:
        raise ScheduleError(
            f"{name} needs the number of {'stages' if stages is None else 'micro-batches'}",
            where=COMMAND_LINE,
            rule="a schedule by name needs --stages and --microbatches",
            fix=f"meshwright {command} {name} --stages {stages or 4} --microbatches {microbatches or 8}",
        )
    try:
        return generate(name, num_stages=stages, num_microbatches=microbatches, num_chunks=chunks)
    except ScheduleError as error:
        raise _located(error, f"{COMMAND_LINE}, {name}") from None


def _read(path: Path) -> Schedule:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(
            f"can't read {path}: {reason}",
            where=str(path),
            rule="a table file has the format of --csv or --json",
            fix=A_TABLE,
        ) from None
    try:
        if path.suffix == ".json":
            schedule = Schedule.from_json(text, where=str(path))
        else:
            schedule = Schedule.from_csv(text, where=str(path), kind=path.stem)
    except ScheduleError as error:
        raise _located(error, error.where) from None
    try:
        verify(schedule)
    except ScheduleError as error:
        raise _located(error, f"{path}, {error.where}" if error.where else str(path)) from None
    return schedule


def _located(error: ScheduleError, where: str) -> ScheduleError:
    return ScheduleError(error.what, where=where, rule=error.rule, fix=error.fix or A_TABLE)
