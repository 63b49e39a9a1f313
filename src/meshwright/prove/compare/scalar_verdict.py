"""Verdicts on the numbers that every rank reports in every step: losses and gradient norms."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.prove.compare.result import Diagnosis, Kind, SeriesResult, StepValue
from meshwright.prove.compare.tensor_shards import Array, Assembly, over
from meshwright.prove.diagnose.factors import Counts
from meshwright.prove.diagnose.gradient_norm import diagnose_norm, norm_subject
from meshwright.prove.diagnose.losses import diagnose_loss, diagnose_series
from meshwright.prove.stage_placement import Stages

REFERENCE_NOT_FINITE = Diagnosis(
    Kind.EVIDENCE, "a number of the reference is not finite", "the reference is at fault, not the layout"
)


@dataclass(frozen=True)
class Limits:
    """Tolerances of step 1 and of later steps."""

    first: float
    later: float


def weigh_series(by_rank: list[list[float]], dues: list[float], num_ranks: int, limits: Limits) -> SeriesResult:
    """The verdict on each step, without a diagnosis; what a rank did not report is not a number."""
    steps = []
    for at, due in enumerate(dues):
        found = tuple(
            float(by_rank[rank][at]) if rank < len(by_rank) and at < len(by_rank[rank]) else float("nan")
            for rank in range(num_ranks)
        )
        errors = [over(abs(value - due), abs(due)) for value in found]
        errors = [error if np.isfinite(error) else float("inf") for error in errors]
        worst, tolerance = int(np.argmax(errors)), limits.first if at == 0 else limits.later
        ok = bool(np.isfinite(due)) and errors[worst] <= tolerance
        steps.append(StepValue(at + 1, due, found, errors[worst], worst, tolerance, ok))
    return SeriesResult(tuple(steps))


def explain_losses(
    losses: SeriesResult, parts: Array | None, counts: Counts, *, follows: str, update_wrong: bool
) -> SeriesResult:
    """Losses with the cause of what is wrong in them, see `diagnose_losses`."""
    if all(step.ok for step in losses.steps):
        return losses
    if not all(np.isfinite(step.due) for step in losses.steps):
        return replace(losses, diagnosis=REFERENCE_NOT_FINITE)
    first = losses.steps[0]
    cause = None if first.ok else diagnose_loss(first, parts, counts, follows=follows)
    return replace(losses, diagnosis=diagnose_series(losses.steps, cause, what="loss", update_wrong=update_wrong))


def explain_first_norm(
    norms: SeriesResult,
    gradients: dict[str, Assembly],
    counts: Counts,
    stages: Stages | None,
    *,
    gradients_wrong: bool,
) -> SeriesResult:
    """Norms with the cause of a wrong step 1; later steps have to wait until the parameters are judged."""
    if not norms.steps or norms.steps[0].ok:
        return norms
    if not all(np.isfinite(step.due) for step in norms.steps):
        return replace(norms, diagnosis=REFERENCE_NOT_FINITE)
    first = norms.steps[0]
    subject = norm_subject(list(first.found), first.due, gradients, counts, stages)
    return replace(norms, diagnosis=diagnose_norm(subject, gradients_wrong=gradients_wrong))


def explain_later_norms(norms: SeriesResult, *, update_wrong: bool) -> SeriesResult:
    """Norms with the cause of a wrong later step, where step 1 is right."""
    if norms.diagnosis is not None or all(step.ok for step in norms.steps):
        return norms
    found = diagnose_series(norms.steps, None, what="gradient norm", update_wrong=update_wrong)
    return replace(norms, diagnosis=found)
