"""What ran when: simulated or measured, in one format, so that the two can be laid over each other."""

from __future__ import annotations

import json
from dataclasses import dataclass

from meshwright.pipeline.table import Action


@dataclass(frozen=True)
class Span:
    """One action's time on one rank."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Spans in the order of their start, per rank."""

    num_ranks: int
    spans: tuple[Span, ...]

    @property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return max((span.end for span in self.spans), default=0.0) - min((s.start for s in self.spans), default=0.0)

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        """One rank's spans."""
        return tuple(span for span in self.spans if span.rank == rank)

    def to_chrome_trace(self, *, time_us: float, name: str) -> str:
        """JSON for chrome://tracing and Perfetto: a process with a thread per rank.

        Args:
            time_us: microseconds in one unit of the timeline.
            name: what the process is called.
        """
        events: list[dict[str, object]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": name}}]
        events += [
            {"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}}
            for rank in range(self.num_ranks)
        ]
        events += [
            {
                "ph": "X",
                "pid": 0,
                "tid": span.rank,
                "name": str(span.action),
                "cat": span.action.kind.value,
                "ts": span.start * time_us,
                "dur": (span.end - span.start) * time_us,
                "args": {"stage": span.action.stage, "microbatch": span.action.microbatch},
            }
            for span in self.spans
        ]
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
