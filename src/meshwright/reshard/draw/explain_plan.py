"""A plan in words: a line for each step, and how far it all is from what any method must receive."""

from __future__ import annotations

from meshwright.mesh.layout import Layout
from meshwright.reshard.planner.steps import LOCAL, ReshardPlan, Step
from meshwright.units import format_bytes

MAX_LAYOUT = 28
"""Columns of a layout's name, so that a line of the table has 110 at most."""

HEAD = ("step", "kind", "axes", "layout after", "received", "sent", "time", "live")
LEFT = (False, True, True, True, False, False, False, False)


def explain_plan(plan: ReshardPlan) -> str:
    """The plan as a table, and its cost against the lower bound; one line when nothing has to move.

    Columns: what the rank with the most receives and sends, the time by the cost model, and the most that a rank holds.
    """
    if not plan.steps:
        return f"{headline(plan)}: every rank has its part already, nothing has to move"
    rows = [HEAD, *(_row(number, step) for number, step in enumerate(plan.steps, start=1))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = [
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(row, widths, LEFT, strict=True)
        ).rstrip()
        for row in rows
    ]
    return "\n".join([headline(plan), *lines, *totals(plan)])


def headline(plan: ReshardPlan) -> str:
    """From where to where, and of what tensor on what mesh."""
    return f"{short(plan.src)} → {short(plan.dst)} · {tensor(plan)}"


def tensor(plan: ReshardPlan) -> str:
    """The tensor and the mesh in words."""
    shape = " × ".join(map(str, plan.src.shape)) or "one number"
    return f"{shape} {plan.dtype} on a mesh of {' × '.join(map(str, plan.src.axis_sizes))}"


def short(layout: Layout) -> str:
    """A layout's name, cut where it is long."""
    name = str(layout)
    return name if len(name) <= MAX_LAYOUT else name[: MAX_LAYOUT - 1] + "…"


def format_time(time_us: float) -> str:
    """`3.4 µs`, `12.7 ms`, `1.20 s`."""
    for size, name in ((1e6, "s"), (1e3, "ms")):
        if time_us >= size:
            return f"{time_us / size:.3g} {name}"
    return f"{time_us:.3g} µs"


def totals(plan: ReshardPlan) -> list[str]:
    """What the whole plan costs the busiest rank, and what any other would."""
    received, bound = plan.bytes_received, plan.lower_bound_bytes
    if received == 0:
        against = "nothing is received"
    elif received == bound:
        against = f"a rank receives {format_bytes(received)} at most, which is the least that any method can do"
    elif bound == 0:
        against = f"a rank receives {format_bytes(received)} at most; no lower bound is known"
    else:
        against = (
            f"a rank receives {format_bytes(received)} at most, {received / bound:.2f} times the "
            f"{format_bytes(bound)} that any method must"
        )
    return [
        against,
        f"it sends {format_bytes(plan.bytes_sent)} at most, holds {format_bytes(plan.peak_bytes)} at most, and takes "
        f"{format_time(plan.time_us)} by the cost model",
    ]


def _row(number: int, step: Step) -> tuple[str, ...]:
    kind = f"{step.kind} ×{step.rounds}" if step.rounds > 1 else str(step.kind)
    live = format_bytes(step.live_bytes)
    if step.kind in LOCAL:
        return str(number), kind, "", short(step.dst), "–", "–", "–", live
    axes, time = " ".join(map(str, step.axes)), format_time(step.time_us)
    received, sent = format_bytes(step.bytes_received), format_bytes(step.bytes_sent)
    return str(number), kind, axes, short(step.dst), received, sent, time, live
