"""What a proof concludes, as values: verdicts, errors, and causes in words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from meshwright.mesh.axes import Axes
from meshwright.prove.compare.tensor_shards import Error


class Kind(Enum):
    """What sort of fault a diagnosis names."""

    EVIDENCE = "evidence"
    """Something is missing, or the pieces do not make up the tensor."""
    NON_FINITE = "non-finite"
    ZERO = "zero"
    SCALED = "scaled"
    PARTS = "parts"
    """Shares or micro-batches are missing, counted twice or exchanged."""
    SUM_MISSING = "sum-missing"
    COPIES_DIFFER = "copies-differ"
    MOVED = "moved"
    """The right numbers in a wrong place."""
    NOT_UPDATED = "not-updated"
    STEP_SCALED = "step-scaled"
    WEIGHT_DECAY = "weight-decay"
    NORM_MEMBERS = "norm-members"
    """A norm that leaves parameters or ranks out, or counts them more than once."""
    NORM_FORM = "norm-form"
    SAMPLES = "samples"
    OUT_OF_STEP = "out-of-step"
    CONSEQUENCE = "consequence"
    """Follows from another finding."""
    UNRECOGNISED = "unrecognised"


@dataclass(frozen=True)
class Diagnosis:
    """A likely cause. Findings with equal `kind`, `seen` and `cause` are one finding on the screen."""

    kind: Kind
    seen: str
    """What the numbers show: `2.000 × the reference on every rank`."""
    cause: str
    """What does that: `summed over dp_shard (2 ranks) where a mean was due`."""
    detail: str = ""
    """What is particular to this tensor."""
    factor: float | None = None
    """The multiple of the reference, where that is all that is wrong."""
    microbatches: tuple[int, ...] = ()
    """Those that are missing (`is_lost`) or counted more than once on every share, where that is all that is wrong."""
    is_lost: bool = False

    @property
    def text(self) -> str:
        """All of it in one line."""
        return self.seen + ": " + "; ".join(part for part in (self.cause, self.detail) if part)


@dataclass(frozen=True)
class TensorResult:
    """One tensor of a parameter: its gradient, or its value before the first or after the last step."""

    error: Error
    tolerance: float
    ok: bool
    replicated: tuple[str, ...] = ()
    num_copies: int = 1
    copies_equal: bool = True
    """Bitwise."""
    copies_agree: bool = True
    """Within twice the tolerance, as copies that are both right do."""
    copy_difference: float = 0.0
    diagnosis: Diagnosis | None = None


@dataclass(frozen=True)
class ParameterResult:
    """A parameter passes when all that is known of it passes."""

    name: str
    shape: tuple[int, ...]
    gradient: TensorResult | None
    """Of step 1; None for a parameter that takes no gradient in the reference."""
    final: TensorResult
    """After the last step."""
    initial: TensorResult | None = None
    """Before the first step; None when it was not recorded."""
    first: TensorResult | None = None
    """After the first step; None when it was not recorded."""

    def tensors(self) -> list[TensorResult]:
        """In the order a fault would travel."""
        return [t for t in (self.initial, self.gradient, self.first, self.final) if t is not None]

    @property
    def ok(self) -> bool:
        return all(tensor.ok for tensor in self.tensors())

    @property
    def root(self) -> TensorResult:
        """What the parameter's verdict, error and cause are about: its gradient, or where that is right (or there
        is none) the earliest value that is not."""
        if self.gradient is not None and not self.gradient.ok:
            return self.gradient
        wrong = [tensor for tensor in self.tensors() if not tensor.ok]
        return wrong[0] if wrong else self.gradient or self.final


@dataclass(frozen=True)
class StepValue:
    """A number that every rank reports in every step."""

    step: int
    """From 1."""
    due: float
    found: tuple[float, ...]
    """Per rank."""
    relative_error: float
    """The worst rank's."""
    rank: int
    tolerance: float
    ok: bool


@dataclass(frozen=True)
class SeriesResult:
    """The losses, or the gradient norms."""

    steps: tuple[StepValue, ...]
    diagnosis: Diagnosis | None = None

    @property
    def ok(self) -> bool:
        return bool(self.steps) and all(step.ok for step in self.steps)

    def num_right(self) -> int:
        return sum(step.ok for step in self.steps)


@dataclass(frozen=True)
class ProofResult:
    """The whole proof."""

    axes: Axes
    num_microbatches: int
    gradient_tolerance: float
    later_tolerance: float
    num_steps: int
    findings: tuple[Diagnosis, ...]
    """Evidence that is missing, contradicts itself, or proves nothing."""
    samples: tuple[Diagnosis, ...]
    """Ranks that read what they should not have."""
    losses: SeriesResult
    grad_norm: SeriesResult
    parameters: tuple[ParameterResult, ...]
    notes: tuple[str, ...] = ()
    """Remarks on the whole that help to find a fault, or qualify a pass."""

    @property
    def passed(self) -> bool:
        series = self.losses.ok and self.grad_norm.ok
        clean = not self.findings and not self.samples
        return clean and series and bool(self.parameters) and all(p.ok for p in self.parameters)
