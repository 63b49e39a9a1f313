"""Plans made by hand: kinds, axes and layouts are given, what they cost is counted from the pieces that are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwright.mesh.layout import Layout
from meshwright.reshard.pieces import received, sent, staging_elements
from meshwright.reshard.steps import LOCAL, ReshardPlan, Step, StepKind, dtype_bytes


def plan_of(
    mesh: Sequence[int], shape: Sequence[int], src: str, *steps: tuple[str, str, str], dtype: str = "bf16",
    bound: int | None = None, rounds: int = 1,
) -> ReshardPlan:  # fmt: skip
    """A plan from `src` through steps of (kind, axes like "0 1", layout after); the bound is what is received unless
    it is given."""
    first = at = Layout.parse(src, mesh, shape)
    size, made, totals = dtype_bytes(dtype), [], [[0] * at.num_ranks(), [0] * at.num_ranks()]
    for kind, axes, after in steps:
        dst = Layout.parse(after, mesh, shape)
        step = Step(StepKind(kind), tuple(map(int, axes.split())), at, dst, 0, 0, 0.0, 0, rounds)
        made.append(_counted(step, first if made else None, size, totals))
        at = dst
    received_most = max(totals[1])
    return ReshardPlan(
        first, at, dtype, tuple(made), max(totals[0]), received_most, received_most if bound is None else bound,
        max([step.live_bytes for step in made], default=size * int(first.local_numels().max())),
        sum(step.time_us for step in made),
    )  # fmt: skip


def _counted(step: Step, first: Layout | None, size: int, totals: list[list[int]]) -> Step:
    out, into, live = [], [], []
    for rank in range(step.src.num_ranks()):
        away = step.kind not in LOCAL
        out.append(size * sum(p.numel() for p in sent(step, rank) if p.receiver != rank) * away)
        into.append(size * sum(p.numel() for p in received(step, rank) if p.sender != rank) * away)
        held = [step.src, step.dst, *([first] if first else [])]
        elements = sum(int(layout.local_numels()[rank]) for layout in held) + staging_elements(step, rank, step.rounds)
        live.append(size * elements)
        totals[0][rank] += out[-1]
        totals[1][rank] += into[-1]
    time_us = 3.4 + max(out + into) / 450e3 if step.kind not in LOCAL else 0.0
    return replace(step, bytes_sent=max(out), bytes_received=max(into), time_us=time_us, live_bytes=max(live))
