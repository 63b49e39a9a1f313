"""Where a rank's time of a step went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from meshwright.pipeline.timeline import Reading, TimedOperation

ZERO = Reading(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class StepParts:
    """A rank's time of a step, in seconds."""

    compute: float
    """Forward and backward: on the CPU, time on a core; on a GPU, all of it, with the communication inside blocks."""
    data: float
    """Waiting for batches, or preparing them."""
    communication: float
    """Waiting for collectives and messages, which no computation hides."""
    bubble: float
    """Waiting for other stages that the pipeline schedule itself implies."""
    optimizer: float
    """Gradient norm, clipping and update."""
    core: float
    """Ready to run, but waiting for a core of this machine."""
    other: float

    def total(self) -> float:
        """Return the time of the step."""
        return sum((getattr(self, field.name) for field in fields(self)), 0.0)


@dataclass(frozen=True)
class RawParts:
    """Times of a step before waiting is divided into bubble and communication."""

    total: float
    compute: float
    data: float
    blocked: float
    """Blocked within computations, in gradient reductions and in messages that were sent."""
    stages: float
    """Blocked until other stages' tensors had arrived, or until all ranks had ended the step."""
    optimizer: float
    core: float

    def split(self, idle: float) -> StepParts:
        """Divide the waiting for other stages.

        Args:
            idle: time in which the schedule has nothing to do on this rank, with the measured times of computations.
        """
        bubble = min(self.stages, idle)
        known = (self.compute, self.data, self.blocked + self.stages - bubble, bubble, self.optimizer, self.core)
        return StepParts(*known, other=max(0.0, self.total - sum(known)))


def raw_parts(
    timed: Sequence[TimedOperation], data: Reading, *, begin: Reading, reduce: Reading, reduced: Reading, end: Reading
) -> RawParts:
    """Return the times of a step.

    Args:
        timed: operations of the pipeline executor.
        data: time within the functions that return batches, which forwards call.
        begin: at the beginning of the step.
        reduce: before the sum over all ranks that ends the backwards.
        reduced: after it.
        end: at the end of the step.
    """
    ran = timed[-1].end if timed else begin
    norm, update = reduce - ran, end - reduced
    inside = [one.end - one.start for one in timed if one.is_compute]
    # In an overlapped pair, a thread is blocked while the other one computes.
    paired = sum(time.blocked for one, time in _pairs(timed))
    outside = [one.end - one.start for one in timed if not one.is_compute]
    waits = [one.start - one.before for one in timed]
    whole = end - begin
    compute = sum(time.cpu for time in inside) + paired - data.cpu
    return RawParts(
        total=whole.wall,
        compute=max(0.0, compute),
        data=data.wall - data.queued,
        blocked=max(0.0, sum(time.blocked for time in (*inside, *outside)) - paired - data.blocked),
        stages=sum(time.blocked for time in waits) + (reduced - reduce).blocked,
        optimizer=norm.cpu + norm.blocked + update.cpu + update.blocked,
        core=whole.queued,
    )


def _pairs(timed: Sequence[TimedOperation]) -> list[tuple[TimedOperation, Reading]]:
    return [(one, one.end - one.start) for one in timed if one.turns is not None]
