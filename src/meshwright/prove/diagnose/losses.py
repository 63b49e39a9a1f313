"""Why a loss is wrong: summed or averaged over the wrong things, a rank's own share only, or a consequence."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import numpy as np

from meshwright.prove.compare.result import Diagnosis, Kind, StepValue
from meshwright.prove.compare.tensor_shards import Array, coordinates
from meshwright.prove.diagnose.contributions import weights_diagnosis
from meshwright.prove.diagnose.factors import Counts, close, factor_cause
from meshwright.prove.diagnose.fit_contributions import RESIDUAL, Puzzle, cell_weights
from meshwright.prove.diagnose.phrases import join_words, number_words, place_words, rank_words


def diagnose_series(
    steps: tuple[StepValue, ...], first: Diagnosis | None, *, what: str, update_wrong: bool
) -> Diagnosis:
    """The cause for the first wrong step of losses or norms; `first` is the diagnosis of a wrong step 1."""
    wrong = [step for step in steps if not step.ok]
    if first is not None:
        return first
    found = wrong[0]
    bad = [rank for rank, value in enumerate(found.found) if not math.isfinite(value)]
    if bad:
        return Diagnosis(Kind.NON_FINITE, f"{what} not finite in step {found.step} on {rank_words(bad)}", "see there")
    for away in (-1, 1):
        at = found.step - 1 + away
        if 0 <= at < len(steps) and all(close(value, steps[at].due) for value in found.found):
            word = "behind" if away < 0 else "ahead"
            seen = f"{what} of step {found.step} is the reference's of step {at + 1}"
            return Diagnosis(Kind.OUT_OF_STEP, seen, f"one step {word}")
    seen = f"{what} right in step 1, wrong from step {found.step} on"
    if update_wrong:
        return Diagnosis(Kind.CONSEQUENCE, seen, "follows from a wrong update: see the parameters")
    return Diagnosis(Kind.UNRECOGNISED, seen, "not recognised", _worst(found))


def diagnose_loss(step: StepValue, parts: Array | None, counts: Counts, *, follows: str) -> Diagnosis:
    """The likely cause of a wrong loss in step 1. `parts`: [share, micro-batch], adding up to the loss due.

    `follows`: a finding that makes a wrong loss inevitable, in words.
    """
    values = np.array(step.found)
    bad = [int(rank) for rank in np.flatnonzero(~np.isfinite(values))]
    if bad:
        place = place_words(bad, range(len(values)), counts.axes)
        return Diagnosis(Kind.NON_FINITE, f"not finite {place}", "NaN or infinity entered the forward pass")
    return (
        _combination(values, step, parts, counts)
        or _sum_over_ranks(values, step.due, counts)
        or _consequence(step, follows)
        or Diagnosis(Kind.UNRECOGNISED, _seen(values, step), "not recognised: the forward pass differs", _worst(step))
    )


def _combination(values: Array, step: StepValue, parts: Array | None, counts: Counts) -> Diagnosis | None:
    wrong = [rank for rank, value in enumerate(values) if abs(value - step.due) > step.tolerance * abs(step.due)]
    weights: dict[int, Array] = {}
    cells = np.array([[step.due]]) if parts is None else parts
    for rank in wrong:
        found = cell_weights(Puzzle(values[rank : rank + 1], cells[..., None], counts, 1, rank))
        if found is None:
            return None
        weights[rank] = found
    return weights_diagnosis(weights, list(range(len(values))), counts)


def _sum_over_ranks(values: Array, due: float, counts: Counts) -> Diagnosis | None:
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
            ratios = [combine(line) / due if due else math.inf for line in lines.values()]
            if all(abs(ratio - 1.0) <= RESIDUAL for ratio in ratios):
                seen = "ranks report different losses, each its own part"
                return Diagnosis(Kind.SUM_MISSING, seen, f"the {form} over {join_words(axes)} is missing")
            factor = ratios[0]
            why = factor_cause(factor, counts)
            if form == "mean" and why and all(close(ratio, factor) for ratio in ratios):
                seen = f"ranks report different losses, whose mean over {join_words(axes)} is {number_words(factor)} ×"
                return Diagnosis(Kind.SUM_MISSING, seen, why)
    return None


def _consequence(step: StepValue, follows: str) -> Diagnosis | None:
    if not follows:
        return None
    return Diagnosis(Kind.CONSEQUENCE, f"wrong in step {step.step}", f"follows from {follows}")


def _seen(values: Array, step: StepValue) -> str:
    low, high = int(values.argmin()), int(values.argmax())
    if close(float(values[low]), float(values[high])):
        return f"{values[0]:.6g} where {step.due:.6g} was due"
    return f"{rank_words((low, high))} report different losses"


def _worst(step: StepValue) -> str:
    found = step.found[step.rank]
    return f"relative error {step.relative_error:.1e} on rank {step.rank}: {found:.9g} where {step.due:.9g} was due"
