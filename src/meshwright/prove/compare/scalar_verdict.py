"""Verdicts on losses and gradient norms, which every rank reports at every step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.prove.compare.result import Diagnosis, FaultKind, SeriesResult, StepValue
from meshwright.prove.compare.tensor_shards import Array, AssembledTensor, safe_ratio
from meshwright.prove.diagnose.factors import LayoutCounts
from meshwright.prove.diagnose.gradient_norm import diagnose_norm, suspect_norm
from meshwright.prove.diagnose.losses import diagnose_loss, diagnose_series
from meshwright.prove.placement import ExpertPlacement, StagePlacement

REFERENCE_NOT_FINITE = Diagnosis(
    FaultKind.EVIDENCE, "the reference has a non-finite value", "the reference is at fault, not the layout"
)


@dataclass(frozen=True)
class Tolerances:
    """Tolerances for step 1 and for later steps."""

    first: float
    later: float


def compare_series(
    by_rank: list[list[float]], references: list[float], num_ranks: int, tolerances: Tolerances
) -> SeriesResult:
    """Return the verdict on each step, without a diagnosis; missing values count as NaN."""
    steps = []
    for at, expected in enumerate(references):
        found = tuple(
            float(by_rank[rank][at]) if rank < len(by_rank) and at < len(by_rank[rank]) else float("nan")
            for rank in range(num_ranks)
        )
        errors = [safe_ratio(abs(value - expected), abs(expected)) for value in found]
        errors = [error if np.isfinite(error) else float("inf") for error in errors]
        worst, tolerance = int(np.argmax(errors)), tolerances.first if at == 0 else tolerances.later
        ok = bool(np.isfinite(expected)) and errors[worst] <= tolerance
        steps.append(StepValue(at + 1, expected, found, errors[worst], worst, tolerance, ok))
    return SeriesResult(tuple(steps))


def explain_losses(
    losses: SeriesResult, contributions: Array | None, counts: LayoutCounts, *, root_fault: str, update_wrong: bool
) -> SeriesResult:
    """Add a diagnosis of the first wrong loss, if any."""
    if all(step.ok for step in losses.steps):
        return losses
    if not all(np.isfinite(step.expected) for step in losses.steps):
        return replace(losses, diagnosis=REFERENCE_NOT_FINITE)
    first = losses.steps[0]
    cause = None if first.ok else diagnose_loss(first, contributions, counts, root_fault=root_fault)
    return replace(losses, diagnosis=diagnose_series(losses.steps, cause, name="loss", update_wrong=update_wrong))


def explain_first_norm(
    norms: SeriesResult,
    gradients: dict[str, AssembledTensor],
    counts: LayoutCounts,
    stages: StagePlacement | None,
    experts: ExpertPlacement | None = None,
    *,
    gradients_wrong: bool,
) -> SeriesResult:
    """Add a diagnosis if the norm of step 1 is wrong; later steps depend on the parameter verdicts."""
    if not norms.steps or norms.steps[0].ok:
        return norms
    if not all(np.isfinite(step.expected) for step in norms.steps):
        return replace(norms, diagnosis=REFERENCE_NOT_FINITE)
    first = norms.steps[0]
    suspect = suspect_norm(list(first.observed), first.expected, gradients, counts, stages, experts)
    return replace(norms, diagnosis=diagnose_norm(suspect, gradients_wrong=gradients_wrong))


def explain_later_norms(norms: SeriesResult, *, update_wrong: bool) -> SeriesResult:
    """Add a diagnosis if step 1 is correct but a later norm is wrong."""
    if norms.diagnosis is not None or all(step.ok for step in norms.steps):
        return norms
    found = diagnose_series(norms.steps, None, name="gradient norm", update_wrong=update_wrong)
    return replace(norms, diagnosis=found)
