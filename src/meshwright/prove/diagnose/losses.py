"""Diagnose wrong losses: a wrong reduction, a missing reduction, or a consequence of another fault."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import numpy as np

from meshwright.prove.compare.result import Diagnosis, FaultKind, StepValue
from meshwright.prove.compare.tensor_shards import Array, coordinates
from meshwright.prove.diagnose.contributions import weights_diagnosis
from meshwright.prove.diagnose.factors import LayoutCounts, close, factor_cause
from meshwright.prove.diagnose.fit_contributions import RESIDUAL, FitProblem, contribution_weights
from meshwright.prove.diagnose.phrases import number_words, rank_words, scope_words
from meshwright.units import join_words

UNRECOGNISED = "not recognised: the forward pass differs"


def diagnose_series(
    steps: tuple[StepValue, ...], first: Diagnosis | None, *, name: str, update_wrong: bool
) -> Diagnosis:
    """Diagnose the first wrong step of losses or norms; `first` is the diagnosis if that is step 1."""
    wrong = [step for step in steps if not step.ok]
    if first is not None:
        return first
    found = wrong[0]
    bad = [rank for rank, value in enumerate(found.observed) if not math.isfinite(value)]
    if bad:
        symptom = f"{name} not finite in step {found.step} on {rank_words(bad)}"
        return Diagnosis(FaultKind.NON_FINITE, symptom, "NaN or infinity entered the computation")
    for offset in (-1, 1):
        at = found.step - 1 + offset
        if 0 <= at < len(steps) and all(close(value, steps[at].expected, found.tolerance) for value in found.observed):
            word = "behind" if offset < 0 else "ahead"
            symptom = f"{name} of step {found.step} matches step {at + 1} of the reference"
            return Diagnosis(FaultKind.OUT_OF_STEP, symptom, f"one step {word}")
    symptom = f"{name} correct in step 1, wrong from step {found.step} on"
    if update_wrong:
        return Diagnosis(FaultKind.CONSEQUENCE, symptom, "follows from a wrong update: see the parameters")
    return Diagnosis(FaultKind.UNRECOGNISED, symptom, "not recognised", _worst(found))


def diagnose_loss(step: StepValue, contributions: Array | None, counts: LayoutCounts, *, root_fault: str) -> Diagnosis:
    """Return the likely cause of a wrong loss in step 1.

    Args:
        contributions: [data-parallel rank, micro-batch]; they sum to the expected loss.
        root_fault: description of an earlier fault that makes the loss wrong, or an empty string.
    """
    values = np.array(step.observed)
    bad = [int(rank) for rank in np.flatnonzero(~np.isfinite(values))]
    if bad:
        scope = scope_words(bad, range(len(values)), counts.axes)
        return Diagnosis(FaultKind.NON_FINITE, f"not finite {scope}", "NaN or infinity entered the forward pass")
    return (
        _weighted_contributions(values, step, contributions, counts)
        or _sum_over_ranks(values, step.expected, counts)
        or _consequence(step, root_fault)
        or Diagnosis(FaultKind.UNRECOGNISED, _symptom(values, step), UNRECOGNISED, _worst(step))
    )


def _weighted_contributions(
    values: Array, step: StepValue, contributions: Array | None, counts: LayoutCounts
) -> Diagnosis | None:
    limit = step.tolerance * abs(step.expected)
    wrong = [rank for rank, value in enumerate(values) if abs(value - step.expected) > limit]
    weights: dict[int, Array] = {}
    contributions_dm = np.array([[step.expected]]) if contributions is None else contributions
    for rank in wrong:
        found = contribution_weights(FitProblem(values[rank : rank + 1], contributions_dm[..., None], counts, 1, rank))
        if found is None:
            return None
        weights[rank] = found
    return weights_diagnosis(weights, list(range(len(values))), counts)


def _sum_over_ranks(values: Array, expected: float, counts: LayoutCounts) -> Diagnosis | None:
    """Diagnose unreduced losses whose sum or mean along some axes is the expected loss."""
    used = counts.axes.used()
    options = [axes for num in range(1, len(used) + 1) for axes in itertools.combinations(used, num)]
    for axes in options:
        lines: dict[tuple[int, ...], list[float]] = defaultdict(list)
        for rank, value in enumerate(values):
            rest = tuple(at for axis, at in coordinates(counts.axes)[rank].items() if axis not in axes)
            lines[rest].append(float(value))
        if all(len(set(line)) == 1 for line in lines.values()):
            continue
        for form, combine in (("sum", sum), ("mean", lambda line: sum(line) / len(line))):
            ratios = [combine(line) / expected if expected else math.inf for line in lines.values()]
            if all(abs(ratio - 1.0) <= max(RESIDUAL, counts.rounding) for ratio in ratios):
                symptom = "ranks report different losses, each its local contribution"
                return Diagnosis(FaultKind.SUM_MISSING, symptom, f"the {form} over {join_words(axes)} is missing")
            factor = ratios[0]
            why = factor_cause(factor, counts)
            ratio_text = f"{number_words(factor)} × the reference"
            if form == "mean" and why and all(close(ratio, factor, counts.rounding) for ratio in ratios):
                symptom = f"ranks report different losses, whose mean over {join_words(axes)} is {ratio_text}"
                return Diagnosis(FaultKind.SUM_MISSING, symptom, why)
    return None


def _consequence(step: StepValue, root_fault: str) -> Diagnosis | None:
    if not root_fault:
        return None
    return Diagnosis(FaultKind.CONSEQUENCE, f"wrong in step {step.step}", f"follows from {root_fault}")


def _symptom(values: Array, step: StepValue) -> str:
    low, high = int(values.argmin()), int(values.argmax())
    if close(float(values[low]), float(values[high]), step.tolerance):
        return f"{values[0]:.6g}, expected {step.expected:.6g}"
    return f"{rank_words((low, high))} report different losses"


def _worst(step: StepValue) -> str:
    found = step.observed[step.rank]
    return f"relative error {step.relative_error:.1e} on rank {step.rank}: {found:.9g}, expected {step.expected:.9g}"
