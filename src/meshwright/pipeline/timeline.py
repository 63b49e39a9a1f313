"""Timelines of executed actions, simulated or measured, and the clocks that a step's operations are measured with.

A thread is at any moment on a core, ready but waiting for one, or blocked: in a collective, a message or a queue.
Linux accounts for all three (`/proc/<pid>/schedstat`, Documentation/scheduler/sched-stats), so what a step on CPU waits
for is measured from outside, without instrumenting the collectives of FSDP2 and DTensor. With several OpenMP threads,
waiting for the others counts as blocked, too.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshwright.pipeline.actions import COMPUTE, Action
from meshwright.pipeline.schedule_table import parse_action

SCHEDSTAT = "/proc/thread-self/schedstat"


class Span(NamedTuple):
    """Start and end of one action on one rank."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Spans of all ranks, sorted by start time within each rank."""

    num_ranks: int
    spans: tuple[Span, ...]

    @property
    def makespan(self) -> float:
        return max((span.end for span in self.spans), default=0.0) - min((s.start for s in self.spans), default=0.0)

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.rank == rank)


def to_chrome_trace(timelines: Mapping[str, Timeline], *, time_us: float) -> str:
    """Return a trace for chrome://tracing and Perfetto, with one process per timeline and one thread per rank.

    Args:
        time_us: microseconds per time unit of the timelines.
    """
    events: list[dict[str, object]] = []
    for process, (name, timeline) in enumerate(timelines.items()):
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}})
        events += [
            {"ph": "M", "pid": process, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}}
            for rank in range(timeline.num_ranks)
        ]
        events += [
            {
                "ph": "X",
                "pid": process,
                "tid": span.rank,
                "name": str(span.action),
                "cat": span.action.kind.value,
                "ts": span.start * time_us,
                "dur": (span.end - span.start) * time_us,
                "args": {"stage": span.action.stage, "microbatch": span.action.microbatch},
            }
            for span in timeline.spans
        ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def to_json(timelines: Mapping[str, Timeline]) -> str:
    """Serialize timelines by name; `from_json` is the inverse."""
    return json.dumps(to_values(timelines))


def to_values(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """Return timelines by name as JSON values; `from_values` is the inverse."""
    return {
        name: {
            "num_ranks": timeline.num_ranks,
            "spans": [[span.rank, str(span.action), span.start, span.end] for span in timeline.spans],
        }
        for name, timeline in timelines.items()
    }


def from_json(source: str) -> dict[str, Timeline]:
    return from_values(json.loads(source))


def from_values(values: Mapping[str, Any]) -> dict[str, Timeline]:
    """Return the timelines that `to_values` was given."""
    timelines = {}
    for name, entry in values.items():
        spans = (Span(rank, parse_action(text).parts()[0], start, end) for rank, text, start, end in entry["spans"])
        timelines[name] = Timeline(entry["num_ranks"], tuple(spans))
    return timelines


class Reading(NamedTuple):
    """Reading of a thread's clocks, in seconds."""

    wall: float
    cpu: float
    queued: float
    """Time ready to run, waiting for a core."""

    def __sub__(self, earlier: Reading) -> Reading:
        return Reading(*(now - then for now, then in zip(self, earlier, strict=True)))

    @property
    def blocked(self) -> float:
        """Rest of the wall time."""
        return max(0.0, self.wall - self.cpu - self.queued)


ReadClocks = Callable[[], Reading]


class ThreadClock:
    """Clocks of the thread that makes this object; only that thread may read them."""

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open(SCHEDSTAT, os.O_RDONLY)
        except OSError:  # not Linux, or a kernel without it: waiting for a core counts as blocked
            self._file = None

    def __call__(self) -> Reading:
        """Read all clocks, in about 2 µs."""
        queued = 0.0 if self._file is None else int(os.pread(self._file, 64, 0).split()[1]) / 1e9
        return Reading(time.perf_counter(), time.thread_time(), queued)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


@dataclass(frozen=True)
class TimedOperation:
    """Clocks around an operation of the executor; only an overlapped pair has two actions."""

    actions: tuple[Action, ...]
    before: Reading
    """Before waiting for received inputs."""
    start: Reading
    end: Reading
    turns: float | None
    """Wall time that divides a pair's time by its turns, so that its spans don't overlap."""

    @property
    def is_compute(self) -> bool:
        """Whether the operation computes, rather than sends, receives, reduces or frees."""
        return self.actions[0].kind in COMPUTE

    def spans(self, rank: int) -> list[Span]:
        start, end = self.start.wall, self.end.wall
        if self.turns is None:
            return [Span(rank, self.actions[0], start, end)]
        return [Span(rank, self.actions[0], start, self.turns), Span(rank, self.actions[1], self.turns, end)]


def compute_spans(timed: Sequence[TimedOperation], *, rank: int) -> list[Span]:
    """Return the spans of a row's computations, in seconds of the wall clock."""
    return [span for one in timed if one.is_compute for span in one.spans(rank)]
