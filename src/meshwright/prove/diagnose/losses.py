"""Why a loss is wrong: summed or averaged over the wrong things, a rank's own share only, or a consequence."""

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
from meshwright.prove.diagnose.phrases import join_words, number_words, rank_words, scope_words


def diagnose_series(
    steps: tuple[StepValue, ...], first: Diagnosis | None, *, name: str, update_wrong: bool
) -> Diagnosis:
    """The cause for the first wrong step of losses or norms; `first` is the diagnosis of a wrong step 1."""
    wrong = [step for step in steps if not step.ok]
    if first is not None:
        return first
    found = wrong[0]
    bad = [rank for rank, value in enumerate(found.observed) if not math.isfinite(value)]
    if bad:
        return Diagnosis(
            FaultKind.NON_FINITE, f"{name} not finite in step {found.step} on {rank_words(bad)}", "see there"
        )
    for offset in (-1, 1):
        at = found.step - 1 + offset
        if 0 <= at < len(steps) and all(close(value, steps[at].expected) for value in found.observed):
            word = "behind" if offset < 0 else "ahead"
            symptom = f"{name} of step {found.step} is the reference's of step {at + 1}"
            return Diagnosis(FaultKind.OUT_OF_STEP, symptom, f"one step {word}")
    symptom = f"{name} right in step 1, wrong from step {found.step} on"
    if update_wrong:
        return Diagnosis(FaultKind.CONSEQUENCE, symptom, "follows from a wrong update: see the parameters")
    return Diagnosis(FaultKind.UNRECOGNISED, symptom, "not recognised", _worst(found))


def diagnose_loss(
    step: StepValue, contributions: Array | None, counts: LayoutCounts, *, upstream_fault: str
) -> Diagnosis:
    """The likely cause of a wrong loss in step 1. `parts`: [share, micro-batch], adding up to the loss due.

    `follows`: a finding that makes a wrong loss inevitable, in words.
    """
    values = np.array(step.observed)
    bad = [int(rank) for rank in np.flatnonzero(~np.isfinite(values))]
    if bad:
        scope = scope_words(bad, range(len(values)), counts.axes)
        return Diagnosis(FaultKind.NON_FINITE, f"not finite {scope}", "NaN or infinity entered the forward pass")
    return (
        _weighted_contributions(values, step, contributions, counts)
        or _sum_over_ranks(values, step.expected, counts)
        or _consequence(step, upstream_fault)
        or Diagnosis(
            FaultKind.UNRECOGNISED, _symptom(values, step), "not recognised: the forward pass differs", _worst(step)
        )
    )


def _weighted_contributions(
    values: Array, step: StepValue, contributions: Array | None, counts: LayoutCounts
) -> Diagnosis | None:
    wrong = [
        rank for rank, value in enumerate(values) if abs(value - step.expected) > step.tolerance * abs(step.expected)
    ]
    weights: dict[int, Array] = {}
    contributions_dm = np.array([[step.expected]]) if contributions is None else contributions
    for rank in wrong:
        found = contribution_weights(FitProblem(values[rank : rank + 1], contributions_dm[..., None], counts, 1, rank))
        if found is None:
            return None
        weights[rank] = found
    return weights_diagnosis(weights, list(range(len(values))), counts)


def _sum_over_ranks(values: Array, expected: float, counts: LayoutCounts) -> Diagnosis | None:
    """Every rank reports its own part: the parts' sum or mean along some axes is the loss."""
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
            if all(abs(ratio - 1.0) <= RESIDUAL for ratio in ratios):
                symptom = "ranks report different losses, each its own part"
                return Diagnosis(FaultKind.SUM_MISSING, symptom, f"the {form} over {join_words(axes)} is missing")
            factor = ratios[0]
            why = factor_cause(factor, counts)
            if form == "mean" and why and all(close(ratio, factor) for ratio in ratios):
                symptom = (
                    f"ranks report different losses, whose mean over {join_words(axes)} is {number_words(factor)} ×"
                )
                return Diagnosis(FaultKind.SUM_MISSING, symptom, why)
    return None


def _consequence(step: StepValue, upstream_fault: str) -> Diagnosis | None:
    if not upstream_fault:
        return None
    return Diagnosis(FaultKind.CONSEQUENCE, f"wrong in step {step.step}", f"follows from {upstream_fault}")


def _symptom(values: Array, step: StepValue) -> str:
    low, high = int(values.argmin()), int(values.argmax())
    if close(float(values[low]), float(values[high])):
        return f"{values[0]:.6g} where {step.expected:.6g} was due"
    return f"{rank_words((low, high))} report different losses"


def _worst(step: StepValue) -> str:
    found = step.observed[step.rank]
    return (
        f"relative error {step.relative_error:.1e} on rank {step.rank}: {found:.9g} where {step.expected:.9g} was due"
    )
