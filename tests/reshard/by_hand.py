"""Plans made by hand: kinds, axes and layouts are given, what they cost is counted from the pieces that are sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import prod

from meshwright.mesh.layout import Layout
from meshwright.reshard.planner.steps import LOCAL, ReshardPlan, Step, StepKind, dtype_bytes
from meshwright.reshard.run.shard_exchange import messages_received, messages_sent, split_into_rounds


def plan_of(
    mesh: Sequence[int], shape: Sequence[int], src: str, *steps: tuple[str, str, str], dtype: str = "bf16",
    bound: int | None = None, rounds: int = 1,
) -> ReshardPlan:  # fmt: skip
    """A plan from `src` through steps of (kind, axes like "0 1", layout after)."""
    first = at = Layout.parse(src, mesh, shape)
    size, made, totals = dtype_bytes(dtype), [], [[0] * at.num_ranks(), [0] * at.num_ranks()]
    for kind, axes, after in steps:
        dst = Layout.parse(after, mesh, shape)
        step = Step(StepKind(kind), tuple(map(int, axes.split())), at, dst, 0, 0, 0.0, 0, rounds)
        made.append(_counted(step, first if made else None, size, totals))
        at = dst
    return ReshardPlan(
        first, at, dtype, tuple(made), max(totals[0]), max(totals[1]),
        size * bound_of(first, at) if bound is None else bound,
        max([step.live_bytes for step in made], default=size * int(first.local_numels().max())),
        sum(step.time_us for step in made),
    )  # fmt: skip


def _counted(step: Step, first: Layout | None, size: int, totals: list[list[int]]) -> Step:
    out, into, live = [], [], []
    for rank in range(step.src.num_ranks()):
        away = step.kind not in LOCAL
        out.append(size * sum(p.numel() for p in messages_sent(step, rank) if p.receiver != rank) * away)
        into.append(size * sum(p.numel() for p in messages_received(step, rank) if p.sender != rank) * away)
        held = [step.src, step.dst, *([first] if first else [])]
        elements = sum(int(layout.local_numels()[rank]) for layout in held) + staging_elements(step, rank, step.rounds)
        live.append(size * elements)
        totals[0][rank] += out[-1]
        totals[1][rank] += into[-1]
    time_us = 3.4 + max(out + into) / 450e3 if step.kind not in LOCAL else 0.0
    return replace(step, bytes_sent=max(out), bytes_received=max(into), time_us=time_us, live_bytes=max(live))


def bound_of(src: Layout, dst: Layout) -> int:
    """Elements that some rank must receive by any method, from the sets of elements that the ranks have."""
    assert prod(src.shape) * src.num_ranks() <= 10**6, "give the bound"
    has, due = _elements(src), _elements(dst)
    changed = [axis for axis, (a, b) in enumerate(zip(src.partial, dst.partial, strict=True)) if a is not b]
    values = prod(src.axis_sizes[axis] for axis in changed if src.partial[axis])
    shares = prod(src.axis_sizes[axis] for axis in changed if dst.partial[axis])
    lacks = [len(need if values > 1 else need - own) for own, need in zip(has, due, strict=True)]
    most = max(lacks) if shares == 1 else 0
    if values == 1:
        return most
    # Each element of each group of partial values that stay: values - 1 to bring it together; then, of the group that
    # has all of them, to all but one.
    kept = [axis for axis in src.partial_axes() if axis not in changed]
    holders = Counter((element, tuple(dst.coordinate(rank)[axis] for axis in kept))
                      for rank, need in enumerate(due) for element in need)  # fmt: skip
    copies = {element: count // shares for (element, _), count in holders.items()}
    transfers = (values - 1) * len(holders) + sum(copies.values()) - len(copies)
    return max(most, -(-transfers // src.num_ranks()))


def _elements(layout: Layout) -> list[set[tuple[int, ...]]]:
    found = []
    for rank in range(layout.num_ranks()):
        dims = [[i for s in slices for i in range(s.start, s.stop)] for slices in layout.local_slices(rank)]
        found.append(set(product(*dims)))
    return found


def staging_elements(step: Step, rank: int, rounds: int = 1) -> int:
    """Return the peak number of staging elements on the rank during the step.

    Staging elements are those packed for and received from other ranks in a round; local elements are copied directly.
    An all-gather stages the size of the largest shard once per rank of the group.
    """
    if step.kind in LOCAL:
        return 0
    if step.kind is StepKind.ALL_GATHER:
        largest = int(step.src.local_numels().max())
        return prod(step.src.axis_sizes[axis] for axis in step.axes) * -(-largest // rounds)
    remote_messages = [message for message in messages_received(step, rank) if message.sender != rank]
    remote_messages += [message for message in messages_sent(step, rank) if message.receiver != rank]
    sizes = [
        [part.numel() if part else 0 for part in split_into_rounds(message, rounds)] for message in remote_messages
    ]
    return max((sum(each) for each in zip(*sizes, strict=True)), default=0)
