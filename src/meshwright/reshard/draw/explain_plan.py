"""Text description of a plan: a table of its steps, and its traffic relative to the lower bound."""

from __future__ import annotations

from meshwright.mesh.layout import Layout
from meshwright.reshard.planner.steps import LOCAL, ReshardPlan, Step
from meshwright.units import format_bytes

MAX_LAYOUT, MIN_LAYOUT = 28, 12
"""Maximum width of a layout's name; tables that are too wide truncate it to no less than the minimum."""
COLUMNS = 80
"""Width of a table's lines."""

HEAD = ("step", "kind", "axes", "layout after", "received", "sent", "time", "live")
LAYOUT = HEAD.index("layout after")
LEFT = (False, True, True, True, False, False, False, False)


def explain_plan(plan: ReshardPlan) -> str:
    """Return the plan as a table of steps with its cost and lower bound, or one line if there are no steps.

    The columns are the most bytes received and sent by any rank, the modeled time, and the peak bytes live on any rank.
    """
    if not plan.steps:
        return f"{describe_plan(plan)}: every rank has its shard already, nothing has to move"
    rows = [HEAD, *(_row(number, step) for number, step in enumerate(plan.steps, start=1))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    excess = max(0, sum(widths) + 2 * (len(HEAD) - 1) - COLUMNS)
    widths[LAYOUT] = max(min(MIN_LAYOUT, widths[LAYOUT]), widths[LAYOUT] - excess)
    rows = [(*row[:LAYOUT], _shortened(row[LAYOUT], widths[LAYOUT]), *row[LAYOUT + 1 :]) for row in rows]
    lines = [
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(row, widths, LEFT, strict=True)
        ).rstrip()
        for row in rows
    ]
    return "\n".join([describe_plan(plan), *lines, *summary_lines(plan)])


def describe_plan(plan: ReshardPlan) -> str:
    """Describe the plan's layouts, tensor and mesh in one line."""
    return f"{short_name(plan.src)} → {short_name(plan.dst)} · {describe_tensor(plan)}"


def describe_tensor(plan: ReshardPlan) -> str:
    """Describe the tensor's shape and dtype and the mesh's axis sizes."""
    shape = " × ".join(map(str, plan.src.shape)) or "scalar"
    return f"{shape} {plan.dtype} on a mesh of {' × '.join(map(str, plan.src.axis_sizes))}"


def short_name(layout: Layout) -> str:
    """Return a layout's name, truncated to `MAX_LAYOUT` characters."""
    return _shortened(str(layout), MAX_LAYOUT)


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def format_time(time_us: float) -> str:
    """Format a time with a suitable unit: `3.4 µs`, `12.7 ms`, `1.2 s`."""
    for size, name in ((1e6, "s"), (1e3, "ms")):
        if time_us >= size:
            return f"{time_us / size:.3g} {name}"
    return f"{time_us:.3g} µs"


def summary_lines(plan: ReshardPlan) -> list[str]:
    """Return lines that compare the plan's cost, the maximum over ranks, with the lower bound."""
    received, bound = plan.bytes_received, plan.lower_bound_bytes
    if received == 0:
        against = "nothing is received"
    elif received == bound:
        against = f"each rank receives at most {format_bytes(received)}, the lower bound for any method"
    elif bound == 0:
        against = f"each rank receives at most {format_bytes(received)}; no lower bound is known"
    else:
        against = (
            f"each rank receives at most {format_bytes(received)}, {received / bound:.2f} times the lower bound of "
            f"{format_bytes(bound)}"
        )
    return [
        against,
        f"each rank sends at most {format_bytes(plan.bytes_sent)} and holds at most {format_bytes(plan.peak_bytes)}; "
        f"{format_time(plan.time_us)} by the cost model",
    ]


def _row(number: int, step: Step) -> tuple[str, ...]:
    kind = f"{step.kind} ×{step.rounds}" if step.rounds > 1 else str(step.kind)
    live = format_bytes(step.live_bytes)
    if step.kind in LOCAL:
        return str(number), kind, "", short_name(step.dst), "–", "–", "–", live
    axes, time = " ".join(map(str, step.axes)), format_time(step.time_us)
    received, sent = format_bytes(step.bytes_received), format_bytes(step.bytes_sent)
    return str(number), kind, axes, short_name(step.dst), received, sent, time, live
