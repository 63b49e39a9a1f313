"""Schedules with stages placed on the ranks in one direction: GPipe, 1F1B, interleaved 1F1B and ZB-H1.

GPipe: Huang et al. 2019. 1F1B: Narayanan et al. 2019 (PipeDream-Flush, 2021). Interleaved: Narayanan et al. 2021,
section 2.2. ZB-H1: Qi et al. 2024, "Zero bubble pipeline parallelism", section 2.

p: ranks, r: a rank, m: micro-batches, v: chunks.
"""

from __future__ import annotations

from meshwright.pipeline.actions import Action, ActionKind
from meshwright.pipeline.generate.stage_placement import loop_placement
from meshwright.pipeline.schedule_table import Schedule

K = ActionKind


def f_then_b(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Generate GPipe: all forwards, then all backwards."""
    rows = tuple(
        tuple(Action(kind, rank, m) for kind in (K.FORWARD, K.BACKWARD) for m in range(num_microbatches))
        for rank in range(num_ranks)
    )
    return Schedule("f-then-b", num_microbatches, loop_placement(num_ranks, 1), rows)


def one_f_one_b(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Generate 1F1B: p−r−1 warm-up forwards on rank r, then alternating forwards and backwards."""
    rows = []
    for rank in range(num_ranks):
        forwards = [Action(K.FORWARD, rank, m) for m in range(num_microbatches)]
        backwards = [Action(K.BACKWARD, rank, m) for m in range(num_microbatches)]
        rows.append(_alternate(forwards, backwards, num_warmup=num_ranks - rank - 1))
    return Schedule("1f1b", num_microbatches, loop_placement(num_ranks, 1), tuple(rows))


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Generate interleaved 1F1B with v stages per rank: groups of p micro-batches visit the rank's stages in turn.

    The warm-up has 2(p−r−1) + (v−1)·group forwards; with one rank or one stage per rank it is that of 1F1B. If p does
    not divide m, some groups are larger than p.
    """
    if num_chunks == 1:
        plain = one_f_one_b(num_ranks, num_microbatches)
        return Schedule("interleaved", num_microbatches, plain.stage_ranks, plain.actions)
    groups = _groups(num_microbatches, num_ranks)
    largest = max(map(len, groups))
    rows = []
    for rank in range(num_ranks):
        forwards, backwards = (
            [
                Action(kind, chunk * num_ranks + rank, m)
                for group in groups
                for chunk in chunks
                for m in group
            ]
            for kind, chunks in ((K.FORWARD, range(num_chunks)), (K.BACKWARD, range(num_chunks)[::-1]))
        )  # fmt: skip
        num_warmup = 2 * (num_ranks - rank - 1) + (num_chunks - 1) * largest
        rows.append(_alternate(forwards, backwards, num_warmup=num_warmup))
    return Schedule("interleaved", num_microbatches, loop_placement(num_ranks, num_chunks), tuple(rows))


def zb_h1(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Generate ZB-H1: 1F1B with split backwards, where rank r defers its weight gradients by r micro-batches.

    The first rank's last input gradients then do not wait for any weight gradient. Each rank holds p micro-batches.
    """
    rows = []
    for rank in range(num_ranks):
        num_warmup = min(num_ranks - rank - 1, num_microbatches)
        row = [Action(K.FORWARD, rank, m) for m in range(num_warmup)]
        for m in range(num_microbatches):
            if m + num_warmup < num_microbatches:
                row.append(Action(K.FORWARD, rank, m + num_warmup))
            row.append(Action(K.BACKWARD_INPUT, rank, m))
            if m >= rank:
                row.append(Action(K.BACKWARD_WEIGHT, rank, m - rank))
        done = max(0, num_microbatches - rank)
        row.extend(Action(K.BACKWARD_WEIGHT, rank, m) for m in range(done, num_microbatches))
        rows.append(tuple(row))
    return Schedule("zb-h1", num_microbatches, loop_placement(num_ranks, 1), tuple(rows))


def _alternate(forwards: list[Action], backwards: list[Action], *, num_warmup: int) -> tuple[Action, ...]:
    warmup = min(num_warmup, len(forwards))
    row = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        row += (forward, backward)
    return (*row, *backwards[len(forwards) - warmup :])


def _groups(num_microbatches: int, num_ranks: int) -> list[range]:
    """Split m micro-batches into ⌊m/p⌋ groups of nearly equal size, larger groups first."""
    count = max(1, num_microbatches // num_ranks)
    small, larger = divmod(num_microbatches, count)
    starts = [i * small + min(i, larger) for i in range(count + 1)]
    return [range(starts[i], starts[i + 1]) for i in range(count)]
