"""`meshwright draw capture`: the CUDA graphs of a rank, and the slots that micro-batches hold over time."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.capture.plan import CaptureMode
from meshwright.cli.schedule_argument import COMMAND_LINE, SCHEDULE_HELP, load_schedule
from meshwright.cli.wrapping import paint, show
from meshwright.errors import InputError
from meshwright.units import counted

if TYPE_CHECKING:
    from meshwright.capture import CapturePlan
    from meshwright.pipeline import Schedule

OFF_TERMINAL_COLUMNS = 100


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
    from meshwright.capture import verify_capture
    from meshwright.capture.draw import draw_capture, slot_text
    from meshwright.figure import check_figure
    from meshwright.output_files import check_output, write_output
    from meshwright.pipeline import lower

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
    num_slots = sum(plan.num_slots(stage) for stage, _ in plan.slots)
    parts = [str(len(plan.graphs)), counted(num_slots, "slot"), counted(plan.num_pools, "memory pool")]
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
    from meshwright.capture import LayerSignature, TensorSignature, plan_capture

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
