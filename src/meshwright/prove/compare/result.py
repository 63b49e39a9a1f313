"""Dataclasses for the result of a proof: verdicts, deviations and diagnoses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from meshwright.mesh.axes import Axes
from meshwright.prove.compare.tensor_shards import Deviation


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
    NOT_UPDATED = "not-updated"
    STEP_SCALED = "step-scaled"
    WEIGHT_DECAY = "weight-decay"
    NORM_MEMBERS = "norm-members"
    """A norm omits parameters or ranks, or counts them more than once."""
    NORM_FORM = "norm-form"
    SAMPLES = "samples"
    LEARNING_RATE = "learning-rate"
    OUT_OF_STEP = "out-of-step"
    FORWARD = "forward"
    """A module returns something else than in the reference."""
    VARIANT = "variant"
    """The layout computes exactly what the reference does with a known fault."""
    COUNTS = "counts"
    """Wrong counts of the tokens of experts, or a wrong balancing bias."""
    CONSEQUENCE = "consequence"
    """Consequence of another finding."""
    UNRECOGNISED = "unrecognised"


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
class TensorResult:
    """Verdict on a parameter's gradient, or on its value at one point in training."""

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
    diagnosis: Diagnosis | None = None


@dataclass(frozen=True)
class ParameterResult:
    """Verdict on a parameter; passes if all of its recorded tensors pass."""

    name: str
    shape: tuple[int, ...]
    gradient: TensorResult | None
    """Gradient of step 1; None if the parameter has no gradient in the reference."""
    final: TensorResult
    """Value after the last step."""
    initial: TensorResult | None = None
    """Value before the first step; None if not recorded."""
    first: TensorResult | None = None
    """Value after the first step; None if not recorded."""

    def tensors(self) -> list[TensorResult]:
        """Return the recorded tensors in the order a fault propagates."""
        return [t for t in (self.initial, self.gradient, self.first, self.final) if t is not None]

    @property
    def ok(self) -> bool:
        return all(tensor.ok for tensor in self.tensors())

    @property
    def root(self) -> TensorResult:
        """Tensor to report: the gradient if wrong, else the earliest wrong value, else any."""
        if self.gradient is not None and not self.gradient.ok:
            return self.gradient
        wrong = [tensor for tensor in self.tensors() if not tensor.ok]
        return wrong[0] if wrong else self.gradient or self.final


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


@dataclass(frozen=True)
class SeriesResult:
    """Verdicts on the losses or gradient norms of all steps."""

    steps: tuple[StepValue, ...]
    diagnosis: Diagnosis | None = None

    @property
    def ok(self) -> bool:
        return bool(self.steps) and all(step.ok for step in self.steps)

    def num_right(self) -> int:
        return sum(step.ok for step in self.steps)


@dataclass(frozen=True)
class ProofResult:
    """Result of a proof."""

    axes: Axes
    num_microbatches: int
    gradient_tolerance: float
    later_tolerance: float
    num_steps: int
    findings: tuple[Diagnosis, ...]
    """Findings on missing, inconsistent or vacuous evidence."""
    samples: tuple[Diagnosis, ...]
    """Findings on ranks that read the wrong samples."""
    losses: SeriesResult
    grad_norm: SeriesResult
    parameters: tuple[ParameterResult, ...]
    branches: tuple[Diagnosis, ...] = ()
    """Findings on branches that the compared steps don't take."""
    known: tuple[Diagnosis, ...] = ()
    """Known faults that explain several wrong values at once."""
    notes: tuple[str, ...] = ()
    """Remarks that help locate a fault or qualify a pass."""

    @property
    def passed(self) -> bool:
        series = self.losses.ok and self.grad_norm.ok
        clean = not self.findings and not self.samples and not self.branches
        return clean and series and bool(self.parameters) and all(p.ok for p in self.parameters)
