"""Verify that a plan redistributes a tensor correctly at the stated cost.

Each step must start from the previous step's result, match its kind (`step_kinds`), find all elements of the new shards
within its groups, and have the stated cost, which is recounted (`exchange_counts`). Small plans are also simulated,
tracking every partial value (`step_values`). Checks run from basic to subtle, so that the first failure points to the
root cause.
"""

from __future__ import annotations

import math

import numpy as np

from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout
from meshwright.reshard.planner.steps import LOCAL, ReshardPlan, Step, dtype_bytes
from meshwright.reshard.verify.error import step_error
from meshwright.reshard.verify.exchange_counts import ExchangeCounts, count_exchange, live_elements, lower_bound_bytes
from meshwright.reshard.verify.step_kinds import check_axes, check_complete, check_kind, check_partial
from meshwright.reshard.verify.step_values import check_values
from meshwright.units import counted

COUNTED = "stated numbers equal counted numbers"


def verify(plan: ReshardPlan) -> None:
    """Verify that a plan gives each rank its shard of the destination at the stated cost.

    Args:
        plan: the plan, from any planner.

    Raises:
        LayoutError: if the plan or its stated cost is incorrect. The message names the step, the ranks, the violated
            rule and a fix.
    """
    itemsize = dtype_bytes(plan.dtype)
    _check_chain(plan)
    num_ranks = plan.src.num_ranks()
    sent, received = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    all_counts = []
    for number, step in enumerate(plan.steps, start=1):
        check_axes(number, step)
        check_partial(number, step)
        counts = count_exchange(step)
        check_complete(number, step, counts)
        check_kind(number, step, counts)
        all_counts.append(counts)
        if step.kind not in LOCAL:
            sent += counts.sent() * itemsize
            received += counts.received() * itemsize
    check_values(plan)
    for number, (step, counts) in enumerate(zip(plan.steps, all_counts, strict=True), start=1):
        _check_costs(number, step, counts, plan)
    _check_totals(plan, sent=int(sent.max()), received=int(received.max()))


def _check_chain(plan: ReshardPlan) -> None:
    """Check that all layouts share a tensor shape and mesh, and that each step starts where the previous one ended."""
    ends = [layout for step in plan.steps for layout in (step.src, step.dst)]
    for layout in (plan.dst, *ends):
        if (layout.shape, layout.axis_sizes) != (plan.src.shape, plan.src.axis_sizes):
            raise LayoutError(
                f"layouts of two tensors or meshes: {_tensor(plan.src)} and {_tensor(layout)}",
                where=f"{plan.src} → {plan.dst}",
                rule="a plan redistributes one tensor on one mesh",
                fix=f"use layouts of {_tensor(plan.src)}",
            )
    at, stated = plan.src, "the plan's source"
    for number, step in enumerate(plan.steps, start=1):
        if not step.src.same_as(at):
            what = f"begins with {step.src}, and {stated} is {at}"
            rule = "a step begins with the result of the previous step"
            raise step_error(number, step, what, rule=rule, fix=f"a step that begins with {at}")
        at, stated = step.dst, f"the result of step {number}"
    if not plan.dst.same_as(at):
        raise LayoutError(
            f"the plan ends with {at}, which is not its destination {plan.dst}",
            where=f"{counted(len(plan.steps), 'step')} of {plan.src} → {plan.dst}",
            rule="the last step ends with the plan's destination",
            fix=f"add a step from {at} to {plan.dst}",
        )


def _tensor(layout: Layout) -> str:
    return f"shape {list(layout.shape)} on a mesh of {' × '.join(map(str, layout.axis_sizes))}"


def _check_costs(number: int, step: Step, counts: ExchangeCounts, plan: ReshardPlan) -> None:
    itemsize = dtype_bytes(plan.dtype)
    sent, received = (0, 0) if step.kind in LOCAL else (int(counts.sent().max()), int(counts.received().max()))
    for name, stated, actual in (
        ("sends", step.bytes_sent, sent * itemsize),
        ("receives", step.bytes_received, received * itemsize),
    ):
        if stated != actual:
            what = f"says that a rank {name} {stated} bytes, but the maximum over ranks is {actual}"
            raise step_error(number, step, what, rule=COUNTED, fix=f"{actual} bytes")
    if step.rounds < 1:
        what = f"is split over {counted(step.rounds, 'collective')}"
        raise step_error(number, step, what, rule="an exchange takes at least one collective", fix="rounds=1")
    if not math.isfinite(step.time_us) or step.time_us < 0:
        what = f"takes {step.time_us} µs"
        raise step_error(number, step, what, rule="times are finite and non-negative", fix="use the cost model's time")
    least = live_elements(number, step, counts, plan) * itemsize
    if step.live_bytes < least or (step.rounds == 1 and step.live_bytes != least):
        what = f"says that a rank holds {step.live_bytes} bytes, but the maximum over ranks is {least}"
        raise step_error(number, step, what, rule=COUNTED, fix=f"{least} bytes")


def _check_totals(plan: ReshardPlan, *, sent: int, received: int) -> None:
    held = int(plan.src.local_numels().max()) * dtype_bytes(plan.dtype)
    bound = lower_bound_bytes(plan.src, plan.dst, plan.dtype)
    for name, stated, actual in (
        ("bytes_sent", plan.bytes_sent, sent),
        ("bytes_received", plan.bytes_received, received),
        ("peak_bytes", plan.peak_bytes, max((step.live_bytes for step in plan.steps), default=held)),
        ("lower_bound_bytes", plan.lower_bound_bytes, bound),
    ):
        if stated != actual:
            raise _total_error(plan, name, str(stated), str(actual))
    time_us = sum(step.time_us for step in plan.steps)
    if not math.isclose(plan.time_us, time_us, rel_tol=1e-6, abs_tol=1e-3):
        raise _total_error(plan, "time_us", f"{plan.time_us:g}", f"{time_us:g}")
    if bound > received:
        raise _total_error(plan, "bytes_received", f"{received} (less than the bound)", f"at least {bound}")


def _total_error(plan: ReshardPlan, name: str, stated: str, actual: str) -> LayoutError:
    return LayoutError(
        f"the plan's {name} is {stated}, but its steps give {actual}",
        where=f"{name}, {counted(len(plan.steps), 'step')} of {plan.src} → {plan.dst}",
        rule=COUNTED,
        fix=f"{name}={actual}",
    )
