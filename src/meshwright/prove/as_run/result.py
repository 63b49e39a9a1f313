"""Dataclasses for the result of a proof as run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from meshwright.mesh.axes import Axes
from meshwright.prove.compare.result import Diagnosis

MAX_TOLERANCE = 0.4
"""Largest tolerance that proves anything: a gradient that lacks one of two contributions is off by about 0.7."""


@dataclass(frozen=True)
class Check:
    """Largest error of a value on any rank, with its measured tolerance, in the step that is shown."""

    error: float
    tolerance: float
    step: int = 0
    """The first wrong step or, if all are right, one that proves much."""

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance

    @property
    def proves(self) -> bool:
        """Whether the tolerance is tight enough to tell a wrong value from rounding."""
        return self.tolerance <= MAX_TOLERANCE


@dataclass(frozen=True)
class Finding:
    """Diagnosis with the affected parameters, if any."""

    about: str
    """Kind of value, such as `gradients`, or what else is shown as the title."""
    diagnosis: Diagnosis
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class Feedback:
    """Growth of a codec's errors over the steps: error of the summed gradients over that of a single step."""

    method: str
    observed: float
    with_feedback: float
    """Growth that a plain quantiser with feedback has on the reference's contributions."""
    without: float
    """Growth without feedback."""

    @property
    def ok(self) -> bool:
        return self.observed <= math.sqrt(self.with_feedback * self.without)


@dataclass(frozen=True)
class AsRunResult:
    """Result of a proof as run."""

    axes: Axes
    num_microbatches: int
    num_steps: int
    precision: str
    findings: tuple[Finding, ...]
    gradients: dict[str, Check]
    losses: Check
    norms: Check
    """Norms against those of the recorded gradients."""
    updates: dict[str, Check]
    """Updates of each parameter against AdamW on the recorded gradients, relative to rounding."""
    feedback: Feedback | None = None
    notes: tuple[str, ...] = field(default=())
    """What the proof doesn't cover."""

    @property
    def passed(self) -> bool:
        checks = [self.losses, self.norms, *self.gradients.values(), *self.updates.values()]
        has_values = bool(self.gradients) and bool(self.updates) and self.num_steps > 0
        return has_values and not self.findings and all(check.ok for check in checks)
