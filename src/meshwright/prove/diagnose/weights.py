"""Diagnose wrong parameters before the first step, after it, and after the last step.

A wrong gradient, norm or sample affects every parameter through clipping and the next forward pass, so later errors are
reported as its consequences. Otherwise the diagnosis is a missing update, a scaled update or wrong weight decay. It is
exact after the first step; after the last, errors have fed back through training and factors are prefixed with `about`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from meshwright.prove.compare.result import Diagnosis, FaultKind
from meshwright.prove.compare.tensor_shards import Array, AssembledTensor, LocalShard
from meshwright.prove.diagnose.fit_contributions import is_significant
from meshwright.prove.diagnose.gradients import DiagnosisContext, consequence
from meshwright.prove.diagnose.phrases import EVERYWHERE, number_words, rank_words, scope_words
from meshwright.prove.diagnose.suspect import (
    SuspectTensor,
    incomplete,
    misplaced,
    non_finite,
    replicas_differ,
    unrecognised,
)

EXACT = 1e-6
"""Maximum relative residual of a fit after one step, without feedback."""
ROUGH = 0.05
"""Maximum relative residual of a fit after several steps, with feedback; factors are prefixed with `about`."""


@dataclass(frozen=True, eq=False)
class UpdateHistory:
    """Values and faults before the parameter value under diagnosis."""

    initial: Array | None
    """Reference value before the first step."""
    last: AssembledTensor | None = None
    """Value after the last step in the layout, if an earlier value is being diagnosed."""
    own_fault: str = ""
    """Earlier fault of the same parameter: a wrong gradient, or a wrong update in step 1."""
    root_fault: str = ""
    """Earlier fault elsewhere."""
    is_step_skipped: bool = False
    """Whether step 1 must skip its update because of a non-finite norm."""
    known_right: str = "the gradients and the norm of step 1 are correct"
    """Text that rules out causes outside the optimizer."""


def diagnose_initial(suspect: SuspectTensor, context: DiagnosisContext) -> Diagnosis:
    """Return the likely cause of wrong initial weights."""
    found = incomplete(suspect) or non_finite(suspect) or misplaced(suspect, context.references)
    if found is not None:
        return found
    right = [rank for rank in suspect.informative_ranks if rank not in suspect.wrong_ranks]
    symptom = f"initial weights differ {'on ' + rank_words(suspect.wrong_ranks) if right else EVERYWHERE}"
    cause = "ranks start from different weights than the reference (seed, order of initialization, missing broadcast)"
    base = replicas_differ(suspect) or unrecognised(suspect)
    detail = f"{base.symptom}; {base.detail}" if base.kind is FaultKind.REPLICAS_DIFFER else base.detail
    return Diagnosis(base.kind, symptom, cause, detail)


def diagnose_update(suspect: SuspectTensor, context: DiagnosisContext, history: UpdateHistory) -> Diagnosis:
    """Return the likely cause of a parameter that is wrong after a step."""
    found = incomplete(suspect) or non_finite(suspect)
    if found is not None:
        return found
    if not history.own_fault:
        found = _not_updated(suspect, history) or misplaced(suspect, context.references)
        if found is not None and history.is_step_skipped and found.kind is FaultKind.NOT_UPDATED:
            cause = "follows from a non-finite norm: the step is skipped"
            return Diagnosis(FaultKind.CONSEQUENCE, found.symptom, cause)
        if found is not None:
            return found
    if history.own_fault or history.root_fault:
        cause = f"follows from {history.own_fault or history.root_fault}"
        return consequence(suspect, context) or Diagnosis(FaultKind.CONSEQUENCE, f"wrong {suspect.scope_text()}", cause)
    return _step_fault(suspect, history) or replicas_differ(suspect) or _optimizer_fault(suspect, history)


def _optimizer_fault(suspect: SuspectTensor, history: UpdateHistory) -> Diagnosis:
    base = unrecognised(suspect)
    cause = f"{base.cause}; {history.known_right}: check the optimizer step, clipping and later gradients"
    return Diagnosis(base.kind, base.symptom, cause, base.detail)


def _not_updated(suspect: SuspectTensor, history: UpdateHistory) -> Diagnosis | None:
    start = history.initial
    if start is None:
        return None
    still = {shard.rank: np.array_equal(shard.value, shard.slice_of(start)) for shard in suspect.wrong_shards}
    ranks = {rank for rank, same in still.items() if same}
    if not ranks:
        return None
    scope = scope_words(ranks, suspect.informative_ranks, suspect.counts.axes)
    when = "never updated"
    if history.last is not None and any(
        shard.rank in ranks and not np.array_equal(shard.value, shard.slice_of(start)) for shard in history.last.shards
    ):
        when = "not updated in step 1"
    cause = "the parameter is not in the optimizer, or its gradient was cleared before the step"
    if scope != EVERYWHERE:
        cause = f"the optimizer skipped {rank_words(ranks)}'s shard"
    rest = sorted(set(suspect.wrong_ranks) - ranks)
    detail = f"{rank_words(rest)} differ{'s' if len(rest) == 1 else ''} too, which may be a consequence" if rest else ""
    return Diagnosis(FaultKind.NOT_UPDATED, f"{when}, still at its initial value {scope}", cause, detail)


def _step_fault(suspect: SuspectTensor, history: UpdateHistory) -> Diagnosis | None:
    """Diagnose an error that is proportional to the expected step or to the weights."""
    if history.initial is None:
        return None
    start = history.initial

    def joined(pick: Callable[[LocalShard], Array]) -> Array:
        return np.concatenate([pick(shard).reshape(-1) for shard in suspect.wrong_shards])

    value_n, expected_n = joined(lambda shard: shard.value), joined(lambda shard: shard.slice_of(suspect.expected))
    start_n = joined(lambda shard: shard.slice_of(start))
    # Replicas add no evidence.
    num_distinct = sum({(shard.start, shard.stop): shard.value.size for shard in suspect.wrong_shards}.values())
    taken, step, off = value_n - start_n, expected_n - start_n, value_n - expected_n
    for limit in (EXACT, ROUGH):
        if not is_significant(num_distinct - 1, 1.0, limit):
            return None
        found = _scaled_step(suspect, taken, step, off, limit)
        found = found or _weight_decay(suspect, off, start_n if limit == EXACT else (start_n + expected_n) / 2, limit)
        if found is not None:
            return found
    return None


def _scaled_step(suspect: SuspectTensor, taken: Array, step: Array, off: Array, limit: float) -> Diagnosis | None:
    factor = _coefficient(taken, step, off, limit)
    if factor is None:
        return None
    times = number_words(factor) if limit == EXACT else f"about {factor:.1f}"
    symptom = f"updated by {times} × the reference step {suspect.scope_text()}"
    if factor < 0:
        cause = "the update goes in the opposite direction"
    elif limit == EXACT and abs(factor - round(factor)) < EXACT:
        cause = f"the step was taken {round(factor)} times, or with {round(factor)} times the learning rate"
    else:
        cause = "a different learning rate or number of steps"
    return Diagnosis(FaultKind.STEP_SCALED, symptom, cause, factor=factor)


def _weight_decay(suspect: SuspectTensor, off: Array, weights: Array, limit: float) -> Diagnosis | None:
    rate = _coefficient(off, weights, off, limit)
    if rate is None:
        return None
    sign = "+" if rate > 0 else "−"
    symptom = f"off by {sign}{abs(rate):.2g} × the weights {suspect.scope_text()}"
    cause = "weight decay is missing" if rate > 0 else "weight decay is applied where it should not be, or twice"
    return Diagnosis(FaultKind.WEIGHT_DECAY, symptom, cause, factor=rate)


def _coefficient(value: Array, basis: Array, off: Array, limit: float) -> float | None:
    """Return c such that value ≈ c · basis, or None if the residual is too large relative to the error `off`."""
    energy = float(basis @ basis)
    if energy == 0.0:
        return None
    factor = float(value @ basis) / energy
    residual = float(np.linalg.norm(value - factor * basis))
    return factor if residual <= limit * float(np.linalg.norm(off)) else None
