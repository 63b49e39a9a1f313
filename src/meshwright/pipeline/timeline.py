"""Timelines of executed actions, simulated or measured, in a common format for comparison."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.pipeline.actions import Action
from meshwright.pipeline.serialize import parse_action


@dataclass(frozen=True)
class Span:
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
        """Return the time from the first start to the last end."""
        return max((span.end for span in self.spans), default=0.0) - min((s.start for s in self.spans), default=0.0)

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        """Return the spans of one rank."""
        return tuple(span for span in self.spans if span.rank == rank)


def to_chrome_trace(timelines: Mapping[str, Timeline], *, time_us: float) -> str:
    """Return a trace for chrome://tracing and Perfetto, with one process per timeline and one thread per rank.

    Args:
        timelines: timelines by name.
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
    """Parse timelines written by `to_json`."""
    return from_values(json.loads(source))


def from_values(values: Mapping[str, Any]) -> dict[str, Timeline]:
    """Return the timelines that `to_values` was given."""
    timelines = {}
    for name, entry in values.items():
        spans = (Span(rank, parse_action(text).parts()[0], start, end) for rank, text, start, end in entry["spans"])
        timelines[name] = Timeline(entry["num_ranks"], tuple(spans))
    return timelines
