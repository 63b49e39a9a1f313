"""Time and memory of schedules in closed form: how long the ranks of a pipeline wait, and how many micro-batches they
hold. Candidates are priced by them; finalists are simulated.

1F1B and interleaved: Narayanan et al. 2021, section 2.2. ZB-H1, ZB-V: Qi et al. 2024, "Zero bubble pipeline
parallelism", table 2. V-Half, V-Min: Qi et al. 2024, "Pipeline parallelism with controllable memory". DualPipeV:
DeepSeek-AI 2024, table 2, folded.

p: ranks, m: micro-batches, v: chunks per rank.
"""

from __future__ import annotations

from typing import NamedTuple

SPLIT = ("zb-h1", "zb-v", "dualpipe-v", "v-half", "v-min")
"""Schedules that split the backward."""
V_SHAPED = ("zb-v", "dualpipe-v", "v-half", "v-min")
CHUNKS = (2, 3, 4, 8)
"""Chunks of the interleaved schedules that are candidates."""


class Work(NamedTuple):
    """Work of a rank per micro-batch, over all of its chunks."""

    forward: float
    backward_input: float
    """With recomputation."""
    backward_weight: float

    @property
    def total(self) -> float:
        return self.forward + self.backward_input + self.backward_weight


def choices(num_ranks: int) -> list[tuple[str, int]]:
    """Return the schedules that are candidates for a number of ranks, with their chunks. F-then-B takes as long as 1F1B
    and holds more."""
    if num_ranks == 1:
        return [("1f1b", 1)]
    return [("1f1b", 1), *(("interleaved", v) for v in CHUNKS), ("zb-h1", 1), *((name, 2) for name in V_SHAPED)]


def stages_of(name: str, num_ranks: int, chunks: int, rank: int) -> tuple[int, ...]:
    """Return the stages of a rank."""
    if name in V_SHAPED:
        return rank, 2 * num_ranks - 1 - rank
    return tuple(chunk * num_ranks + rank for chunk in range(chunks))


def span(name: str, p: int, v: int, m: int, *, slowest: Work, every: float, edge: float) -> float:
    """Return the time from the first forward to the last backward.

    Args:
        name: schedule.
        p: number of ranks.
        v: chunks per rank.
        m: number of micro-batches.
        slowest: work of the rank with the most.
        every: sum of the work of all ranks per micro-batch.
        edge: time of a transfer.
    """
    if p == 1:
        return m * slowest.total
    mean = every / p
    share = mean / slowest.total if slowest.total else 0.0
    f, i, w = slowest.forward * share, slowest.backward_input * share, slowest.backward_weight * share
    if name == "interleaved":
        rounds = m * v if m >= p else (m - 1 + p * (v - 1) + 1)
        return rounds * slowest.total / v + (p - 1) * (mean / v + 2 * edge)
    idle = {
        "1f1b": every - slowest.total,
        "zb-h1": (p - 1) * max(f + i - w, 0.0),
        "zb-v": (p - 1) * max((f + i - w) / 2, f + i - 2 * w, 0.0),
        "dualpipe-v": (p - 1) * max(f + 2 * i - w, 0.0) / 2,
        "v-half": (p - 1) * mean / 2,
        "v-min": (p - 1) * mean * 2 / 3,
    }[name]
    # Blocks of V-Half and V-Min are spaced for F, I and W of the same length, and the longest sets the pace.
    pace = {"v-half": 2 * i + f / 2, "v-min": 3 * max(f, i, w)}.get(name, 0.0)
    # A pipeline that never fills waits for every rank once.
    filled = every if m < p else 0.0
    return max(m * max(slowest.total, pace) + idle, filled) + 2 * (p - 1) * edge


def held(name: str, p: int, v: int, m: int, rank: int) -> float:
    """Return how many micro-batches' activations of all its chunks a rank holds at most."""
    found = {
        "1f1b": p - rank,
        "interleaved": (2 * (p - rank - 1) + (v - 1) * max(p, -(-m // max(1, m // p))) + 1) / v,
        "zb-h1": p,
        "zb-v": p,
        "dualpipe-v": p + 0.5,
        "v-half": (p + 2) // 2,
        "v-min": (p + 4) // 3,
    }[name]
    return min(m, found)


def spread(name: str, p: int, v: int, rank: int) -> tuple[float, ...]:
    """Return in which proportion the micro-batches that a rank holds at its peak are those of each of its chunks."""
    if name in V_SHAPED:
        return 2 * (p - rank) - 1, 2 * rank + 1
    if v == 1:
        return (1,)
    first, last = p + max(0, p - 2 * rank - 1), min(p, 2 * (p - rank) - 1)
    return first + 1, *(p,) * (v - 2), last - 1  # after a forward of the first chunk
