"""Result of a proof: verdicts on all values, findings and their causes; and the words that these are told in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from typing import Any

import numpy as np

from meshwright.mesh.axes import Axes
from meshwright.units import counted, join_words

TOLD_APART = 1.5
"""Least ratio of the growth of errors without feedback to that with it."""
MAX_TOLERANCE = 0.4
"""Largest tolerance that proves anything: a gradient that lacks one of two contributions is off by about 0.7."""


class FaultKind(Enum):
    """Kind of fault that a diagnosis reports."""

    EVIDENCE = "evidence"
    """Evidence is missing, or the shards do not form the full tensor."""
    NON_FINITE = "non-finite"
    ZERO = "zero"
    SCALED = "scaled"
    CONTRIBUTIONS = "parts"
    """Contributions of data-parallel ranks or micro-batches are missing, duplicated or swapped."""
    SUM_MISSING = "sum-missing"
    REPLICAS_DIFFER = "copies-differ"
    MISPLACED = "moved"
    """Correct values at the wrong position."""
    ROUNDED = "rounded"
    """Values are rounded to a narrower dtype than they should be."""
    OTHER_STEP = "other-step"
    """Values of another step, or values that another step left behind."""
    NOT_UPDATED = "not-updated"
    STEP_SCALED = "step-scaled"
    WEIGHT_DECAY = "weight-decay"
    OPTIMIZER = "optimizer"
    """The update is that of the optimizer with a known fault or other settings."""
    CLIPPING = "clipping"
    NORM_MEMBERS = "norm-members"
    """A norm omits parameters or ranks, or counts them more than once."""
    NORM_FORM = "norm-form"
    SAMPLES = "samples"
    LEARNING_RATE = "learning-rate"
    FORWARD = "forward"
    """A module returns something else than in the reference."""
    BACKWARD = "backward"
    """A module's backward returns something else than in the reference."""
    COUNTS = "counts"
    """Wrong counts of the tokens of experts, or a wrong balancing bias."""
    CONSEQUENCE = "consequence"
    """Consequence of another finding."""
    UNRECOGNISED = "unrecognised"


UNKNOWN = (FaultKind.UNRECOGNISED, FaultKind.REPLICAS_DIFFER)
"""Kinds of diagnoses that name no cause."""


@dataclass(frozen=True)
class Diagnosis:
    """Symptom and likely cause of a fault; diagnoses with equal `kind`, `symptom` and `cause` are printed once."""

    kind: FaultKind
    symptom: str
    """Observed deviation, such as `2.000 × the reference on every rank`."""
    cause: str
    """Likely cause, such as `summed over dp_shard (2 ranks) instead of averaged`."""
    detail: str = ""
    """Details specific to this tensor."""
    factor: float | None = None
    """Ratio to the reference if the values are an exact multiple of the reference."""
    microbatches: tuple[int, ...] = ()
    """Micro-batches missing (if `is_missing`) or counted more than once on every data-parallel rank."""
    is_missing: bool = False

    @property
    def text(self) -> str:
        """Symptom, cause and detail on one line."""
        return self.symptom + ": " + "; ".join(part for part in (self.cause, self.detail) if part)


@dataclass(frozen=True)
class Finding:
    """A diagnosis with all values that it explains."""

    about: str
    """Kind of value: `samples`, `initial`, `forward`, `gradient`, `loss`, …"""
    diagnosis: Diagnosis
    members: tuple[str, ...] = ()
    """Affected parameters; empty for other kinds of values."""
    num_all: int = 0
    """Total number of parameters with a tensor of this kind."""
    step: int = 0
    """Earliest step in which it is seen, from 1; 0 if it is of no step."""

    @property
    def is_consequence(self) -> bool:
        """Whether it follows from another finding."""
        return self.diagnosis.kind is FaultKind.CONSEQUENCE


@dataclass(frozen=True)
class Deviation:
    """Largest deviation of a tensor from the reference, and its location."""

    max_abs: float
    """Largest absolute difference; infinite if a value is missing or not finite."""
    relative: float
    """Error relative to the scale of the tensor, as its tolerance."""
    rank: int | None = None
    index: tuple[int, ...] = ()
    observed: float = 0.0
    expected: float = 0.0


MISSING = Deviation(math.inf, math.inf)
"""Deviation of a missing or incomplete tensor."""


@dataclass(frozen=True)
class TensorResult:
    """Verdict on a tensor of a parameter, in the step that is shown: the first wrong one, else the largest error."""

    error: Deviation
    tolerance: float
    ok: bool
    replicated: tuple[str, ...] = ()
    num_replicas: int = 1
    replicas_equal: bool = True
    """Whether all replicas are bitwise equal."""
    replicas_agree: bool = True
    """Whether all replicas agree within twice the tolerance, the most that two correct replicas can differ."""
    max_replica_difference: float = 0.0
    step: int = 0
    diagnosis: Diagnosis | None = None

    @property
    def proves(self) -> bool:
        """Whether the tolerance is tight enough to tell a wrong value from rounding."""
        return self.tolerance <= MAX_TOLERANCE


@dataclass(frozen=True)
class ParameterResult:
    """Verdict on a parameter or saved buffer; passes if all of its recorded tensors pass."""

    name: str
    shape: tuple[int, ...]
    initial: TensorResult
    """Value before the first step."""
    gradient: TensorResult | None
    """Gradients of all steps; None without any in the reference."""
    update: TensorResult
    """Values after each step, given the gradients and the values before it."""

    def tensors(self) -> dict[str, TensorResult]:
        """Return the recorded tensors by kind, in the order in which a fault propagates."""
        found = {"initial": self.initial, "gradient": self.gradient, "update": self.update}
        return {about: tensor for about, tensor in found.items() if tensor is not None}

    @property
    def ok(self) -> bool:
        return all(tensor.ok for tensor in self.tensors().values())

    @property
    def about(self) -> str:
        """Kind of the tensor to report: the earliest wrong one, else the gradient."""
        wrong = [(tensor.step, about) for about, tensor in self.tensors().items() if not tensor.ok]
        if wrong:
            return min(wrong, key=lambda pair: (pair[0], list(self.tensors()).index(pair[1])))[1]
        return "update" if self.gradient is None else "gradient"


@dataclass(frozen=True)
class StepValue:
    """Loss or gradient norm of one step, as reported by every rank."""

    step: int
    """Step number, from 1."""
    expected: float
    observed: tuple[float, ...]
    """Reported value per rank."""
    relative_error: float
    """Largest relative error over all ranks."""
    rank: int
    """Rank with the largest error."""
    tolerance: float
    ok: bool
    diagnosis: Diagnosis | None = None


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
    def tells(self) -> bool:
        """Whether growth with and without feedback can be told apart."""
        return self.without >= TOLD_APART * self.with_feedback

    @property
    def ok(self) -> bool:
        return not self.tells or self.observed <= math.sqrt(self.with_feedback * self.without)


@dataclass(frozen=True)
class ProofResult:
    """Result of a proof."""

    axes: Axes
    num_microbatches: int
    num_steps: int
    precision: str
    losses: tuple[StepValue, ...]
    norms: tuple[StepValue, ...]
    """Norms of gradients against those of the recorded gradients."""
    parameters: tuple[ParameterResult, ...]
    findings: tuple[Finding, ...]
    """What is wrong, causes before consequences, each in the order in which it arises."""
    notes: tuple[str, ...] = ()
    """Remarks that help locate a fault or qualify a pass."""
    feedback: Feedback | None = None
    as_run: bool = False
    locate_step: int | None = field(default=None, compare=False)
    """Step for whose forward and backward a second pass is worthwhile; None if there is none."""

    @property
    def passed(self) -> bool:
        series = all(step.ok for step in (*self.losses, *self.norms)) and bool(self.losses)
        feedback = self.feedback is None or self.feedback.ok
        right = bool(self.parameters) and all(p.ok for p in self.parameters)
        return not self.findings and series and right and feedback

    @property
    def asks_for_float64(self) -> bool:
        """Whether a cause isn't known that a proof in float64 may find: in bfloat16 there is no second pass."""
        unknown = (one for one in self.findings if one.about in EXPLAINED and one.diagnosis.kind in UNKNOWN)
        return self.as_run and self.precision == "bfloat16" and any(unknown)

    def explained_by(self, exact: ProofResult) -> ProofResult:
        """Return the result with causes of the same layout's proof in float64 in place of those that aren't known."""
        causes = [one for one in exact.findings if not one.is_consequence and one.diagnosis.kind not in UNKNOWN]
        if exact.passed or not causes:
            found = "the same layout is right in float64: the fault is in what only the run has, such as its precision"
            note = found if exact.passed else "the same layout is wrong in float64, too, for no known cause"
            return replace(self, notes=(*self.notes, note))
        follows = "follows from what is wrong in float64, too"
        left = [
            replace(one, diagnosis=replace(one.diagnosis, kind=FaultKind.CONSEQUENCE, cause=follows))
            if one.about in EXPLAINED and one.diagnosis.kind in UNKNOWN
            else one
            for one in self.findings
        ]
        note = "causes are those of the same layout in float64, which names the place"
        return replace(self, findings=(*causes, *left), notes=(*self.notes, note))


EXPLAINED = ("loss", "gradient")
"""Kinds of values whose unknown causes a proof in float64 may find."""
MAX_LISTED = 8
EVERYWHERE = "on every rank"


@cache
def coordinates(axes: Axes) -> tuple[dict[str, int], ...]:
    """Return the mesh coordinates of every rank; cached because a diagnosis calls this thousands of times."""
    return tuple(axes.coordinate(rank) for rank in range(axes.num_ranks()))


def rank_words(ranks: Iterable[int]) -> str:
    """Format ranks: `rank 3`, `ranks 0 and 2`, `64 ranks (0, 1, 2, … 63)`."""
    found = sorted(set(ranks))
    if len(found) == 1:
        return f"rank {found[0]}"
    if len(found) <= MAX_LISTED:
        return "ranks " + join_words([str(rank) for rank in found])
    return f"{counted(len(found), 'rank')} ({found[0]}, {found[1]}, {found[2]}, … {found[-1]})"


def index_words(indices: Sequence[int]) -> str:
    """Format indices: `4…7`, `3`, `0, 5, 2`; long lists are truncated."""
    values = list(indices)
    if len(values) > 2 and values == list(range(values[0], values[0] + len(values))):
        return f"{values[0]}…{values[-1]}"
    listed = ", ".join(str(value) for value in values[:MAX_LISTED])
    return f"{listed}, … ({len(values)})" if len(values) > MAX_LISTED else listed or "none"


def coordinate_words(coordinate: dict[str, int]) -> str:
    """Format a mesh coordinate: `dp_replicate = 1, tp = 0`."""
    return ", ".join(f"{axis} = {position}" for axis, position in coordinate.items())


def scope_words(wrong: Iterable[int], holders: Iterable[int], axes: Axes) -> str:
    """Format the wrong ranks among `holders`: `on every rank`, `only on rank 3`, `only on ranks 1 and 3 (tp = 1)`."""
    some, every, at_rank = set(wrong), set(holders), coordinates(axes)
    if some >= every:
        return EVERYWHERE
    for axis in axes.used():
        positions = {at_rank[rank][axis] for rank in some}
        if len(positions) == 1:
            at = positions.pop()
            if some == {rank for rank in every if at_rank[rank][axis] == at} and len(some) > 1:
                return f"only on {rank_words(some)} ({axis} = {at})"
    return f"only on {rank_words(some)}"


FEW_ULPS = 16 * float(np.finfo(np.float64).eps)
"""Distance from 1 that a quotient of two float64 means has by rounding alone, which differs between processors."""


def number_words(value: float) -> str:
    """Format a factor with enough digits to distinguish it from 1: `2.000`, `0.00391`, `1 + 3.0e-10`."""
    if not np.isfinite(value) or abs(value - 1.0) <= FEW_ULPS:
        return f"{value:.3f}"
    if abs(value - 1.0) < 5e-3:
        return f"1 {'+' if value > 1 else '−'} {abs(value - 1.0):.1e}"
    text = f"{value:.3f}" if 0.05 <= abs(value) < 1e4 else f"{value:.3g}"
    return text.replace("-", "−") if text.startswith("-") else text


def box_words(mask: np.ndarray[Any, np.dtype[np.bool_]]) -> str:
    """Format the bounding box of the true elements: `element [3, 4]`, `dim 0: 2…3`, `everywhere`."""
    if mask.ndim == 0:
        return "everywhere"
    at = np.argwhere(mask)
    low, high = at.min(axis=0), at.max(axis=0)
    if len(at) == 1:
        return f"element {[int(i) for i in low]}"
    spans = [
        f"dim {dim}: {a}…{b}" if a != b else f"dim {dim}: {a}"
        for dim, (a, b, size) in enumerate(zip(low, high, mask.shape, strict=True))
        if b - a + 1 < size
    ]
    return ", ".join(spans) or "everywhere"
