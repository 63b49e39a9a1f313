"""Causes of wrong losses, and of gradients that the optimizer was given and that are not the clipped ones."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import torch

from meshwright.prove.explain.contributions import FitProblem, contribution_weights, weights_diagnosis
from meshwright.prove.judge.judge import Comparison, Sides, StepComparison, due_factor
from meshwright.prove.judge.tensors import Array, LayoutCounts, close, factor_cause, to_arrays
from meshwright.prove.judge.verdicts import RESIDUAL
from meshwright.prove.record.plain_optimizer import clip_factor, plain_learning_rate
from meshwright.prove.result import Diagnosis, FaultKind, StepValue, coordinates, number_words, rank_words, scope_words
from meshwright.units import join_words

SAME = 1e-9
"""Relative difference of factors that are the same."""
EPSILON = 1e-2
"""Largest number that is added to a norm, relative to it, that may be an epsilon."""


def diagnose_given(sides: Sides, one: StepComparison) -> Diagnosis:
    """Return the cause of gradients that are not the clipped ones in a step."""
    pairs = {rank: list(_pairs(sides, one.step, rank, names)) for rank, names in one.given.items()}
    scope = scope_words(one.given, range(sides.counts.axes.num_ranks()), sides.counts.axes)
    norm, limit = one.norm.expected, sides.limits[one.step - 1]
    due = due_factor(sides, one.step, next(iter(one.given)))
    factors = {rank: _factors(found) for rank, found in pairs.items()}
    known = [factor for found in factors.values() for factor in found.values()]
    if all(None not in found.values() for found in factors.values()):
        low, high = min(known), max(known)  # type: ignore[type-var]
        digits = 12 if close(low, due, 1e-4) else 6  # type: ignore[arg-type]
        symptom = f"the optimizer is given gradients scaled by {low:.{digits}g}"
        symptom += f" to {high:.{digits}g}" * (not close(high, low, SAME))  # type: ignore[arg-type]
        symptom += f" {scope}, expected {due:.{digits}g}"
        cause = _factor_cause(sides, one, factors, due, norm, limit)  # type: ignore[arg-type]
        return Diagnosis(FaultKind.CLIPPING, symptom, cause)
    symptom = f"the optimizer is given other gradients than the clipped ones {scope}"
    if _adds_weights(sides, one.step, pairs, due):
        cause = "weight decay is added to the gradient (L2 regularisation) instead of to the weights"
        return Diagnosis(FaultKind.WEIGHT_DECAY, symptom, cause)
    names = [name for found in pairs.values() for name, _, given in found if given is None]
    if names:
        cause = f"the gradient of {names[0]} was cleared before the step"
        return Diagnosis(FaultKind.NOT_UPDATED, symptom, cause)
    return Diagnosis(FaultKind.UNRECOGNISED, symptom, "they change between clipping and the step")


def _pairs(sides: Sides, step: int, rank: int, names: list[str]) -> Iterator[tuple[str, Array, Array | None]]:
    """Yield a rank's gradients before clipping and as given to the optimizer."""
    record = sides.evidence.ranks[rank].steps[step - 1]
    for name in names:
        before, after = record["gradients"][name][1], record["given"].get(name)
        yield name, to_arrays({"": before})[""], None if after is None else to_arrays({"": after[1]})[""]


def _factors(pairs: list[tuple[str, Array, Array | None]]) -> dict[str, float | None]:
    """Return by what each gradient is multiplied; None for one that is not a multiple."""
    found: dict[str, float | None] = {}
    for name, before, after in pairs:
        energy = float(np.vdot(before, before))
        if after is None or not energy:
            found[name] = None
            continue
        factor = float(np.vdot(before, after)) / energy
        off = float(np.abs(after - factor * before).max(initial=0.0))
        is_multiple = off <= 1e-6 * float(np.abs(after).max(initial=0.0)) + 1e-300
        found[name] = factor if is_multiple else None
    return found


def _factor_cause(
    sides: Sides, one: StepComparison, factors: dict[int, dict[str, float]], due: float, norm: float, limit: float
) -> str:
    known = [factor for found in factors.values() for factor in found.values()]
    same = max(SAME, *(sides.unit(name) / 8 for found in factors.values() for name in found))
    if all(close(factor, 1.0, same) for factor in known):
        return "clipping is missing"
    if all(close(factor, due**2, same) for factor in known):
        return "clipping is applied twice"
    for dtype in (torch.float32, torch.bfloat16):
        rounded = float(torch.tensor(due, dtype=torch.float64).to(dtype))
        if all(abs(factor - rounded) <= 0.02 * abs(due - rounded) for factor in known):
            return f"the factor is rounded to {str(dtype).removeprefix('torch.')}"
    if due == 1.0 and all(close(factor, limit / norm, same) for factor in known):
        return "gradients are scaled to the limit although their norm is below it"
    full = {name: float(np.linalg.norm(v.suspect.expected)) for name, v in one.gradients.items()}
    if all(
        close(factor, clip_factor(full[name], limit), 1e-6)
        for found in factors.values()
        for name, factor in found.items()
    ):
        return "clipping uses the norm of each tensor instead of the global norm"
    if (groups := _by_groups(sides, full, factors, limit)) is not None:
        return groups
    if max(known) - min(known) <= same * max(known):
        epsilon = limit / known[0] - norm if known[0] else math.inf
        if 0 < epsilon <= EPSILON * norm:
            digits = 10.0 ** round(math.log10(epsilon))
            nearly = f"{digits:g}" if abs(epsilon - digits) <= 0.1 * digits else f"{epsilon:.2g}"
            return f"the norm has an epsilon of {nearly} added: the factor is limit / (norm + {nearly})"
        return f"clipping with another norm or limit: {number_words(known[0] / due)} × the right factor"
    by_rank = {rank: set(found.values()) for rank, found in factors.items()}
    if all(max(found) - min(found) <= same * max(found) for found in by_rank.values()):
        return f"ranks clip by different factors: {rank_words(by_rank)} don't use the global norm"
    return "gradients are scaled one by one between clipping and the step"


def _by_groups(sides: Sides, full: dict[str, float], factors: dict[int, dict[str, float]], limit: float) -> str | None:
    """Return the cause if all parameters with the same factor are clipped by their own norm."""
    members: dict[str, set[str]] = {}
    for found in factors.values():
        for name, factor in found.items():
            members.setdefault(f"{factor:.9g}", set()).add(name)
    if not 1 < len(members) < len(full):
        return None
    roles = sides.expected.roles
    for used, names in members.items():
        own = math.sqrt(sum(full[name] ** 2 for name in names))
        if not close(float(used), clip_factor(own, limit), 1e-6):
            return None
    kinds = [join_words(sorted({roles[name].value for name in names})) for names in members.values()]
    return f"clipping uses the norm of each group of parameters instead of the global norm: {'; '.join(kinds)}"


def _adds_weights(sides: Sides, step: int, pairs: dict[int, list[tuple[str, Array, Array | None]]], due: float) -> bool:
    """Return whether what is added to each gradient is a multiple of the parameter, the same for all."""
    rates = []
    for rank, found in pairs.items():
        weights = (
            sides.evidence.ranks[rank].initial if step == 1 else sides.evidence.ranks[rank].steps[step - 2]["weights"]
        )
        for name, before, after in found:
            held = to_arrays({"": weights[name][1]})[""]
            if after is None or not held.any():
                continue
            off = after - due * before
            rate = float(np.vdot(held, off)) / float(np.vdot(held, held))
            if float(np.abs(off - rate * held).max()) > 1e-6 * float(np.abs(off).max()):
                return False
            rates.append(rate)
    return bool(rates) and max(rates) - min(rates) <= 1e-6 * abs(max(rates))


UNRECOGNISED = "not recognised: the forward pass differs"


def diagnose_loss(step: StepValue, contributions: Array | None, counts: LayoutCounts, *, root_fault: str) -> Diagnosis:
    """Return the likely cause of a wrong loss in step 1.

    Args:
        contributions: [data-parallel rank, micro-batch]; they sum to the expected loss.
        root_fault: description of an earlier fault that makes the loss wrong, or an empty string.
    """
    values = np.array(step.observed)
    if not math.isfinite(step.expected):
        return Diagnosis(FaultKind.EVIDENCE, "the reference is not finite", "the reference is at fault, not the layout")
    bad = [int(rank) for rank in np.flatnonzero(~np.isfinite(values))]
    if bad:
        scope = scope_words(bad, range(len(values)), counts.axes)
        return Diagnosis(FaultKind.NON_FINITE, f"not finite {scope}", "NaN or infinity entered the forward pass")
    return (
        _weighted_contributions(values, step, contributions, counts)
        or _rounded(values, step, contributions, counts)
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


def _rounded(values: Array, step: StepValue, parts: Array | None, counts: LayoutCounts) -> Diagnosis | None:
    """Diagnose a loss that is rounded, or whose parts on data-parallel ranks are."""
    by_rank, limit = np.zeros(1) if parts is None else parts.sum(1), max(RESIDUAL, counts.rounding)
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        for value, what in ((by_rank, "data-parallel ranks' parts of the loss are"), (step.expected, "the loss is")):
            rounded = float(torch.as_tensor(value, dtype=torch.float64).to(dtype).double().sum())
            off, error = abs(values - rounded).max(), abs(step.expected - rounded)
            if off <= limit * abs(rounded) and off <= 0.02 * error:
                return Diagnosis(FaultKind.ROUNDED, _symptom(values, step), f"{what} rounded to {name}", _worst(step))
    return None


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


def diagnose_rates(comparison: Comparison) -> Iterator[tuple[int, Diagnosis]]:
    """Yield the first step with a wrong learning rate, and the cause."""
    one = next((one for one in comparison.steps if not one.rate.ok), None)
    if one is None:
        return
    value, axes = one.rate, comparison.sides.counts.axes
    limit = value.tolerance * value.expected
    wrong = [rank for rank, rate in enumerate(value.observed) if abs(rate - value.expected) > limit]
    scope, rate = scope_words(wrong, range(len(value.observed)), axes), value.observed[value.rank]
    symptom = f"the learning rate of step {one.step} is {rate:.6g} {scope}, expected {value.expected:.6g}"
    detail = f"{number_words(rate / value.expected)} × the right one" if value.expected else ""
    yield one.step, Diagnosis(FaultKind.LEARNING_RATE, symptom, _rate_cause(comparison), detail)


def _rate_cause(comparison: Comparison) -> str:
    """Compare the rates of all steps with those of other steps, and with the peak."""
    sides, steps = comparison.sides, comparison.steps
    used = [one.rate.observed[one.rate.rank] for one in steps]
    due = [plain_learning_rate(step, sides.train) for step in range(1, len(used) + 2)]
    if all(close(a, b) for a, b in zip(used, [due[0], *due], strict=False)):
        return "the learning rate is one step behind"
    if all(close(a, b) for a, b in zip(used, due[1:], strict=False)):
        return "the learning rate is one step ahead"
    for number, what in sides.units_of_steps():
        late = [plain_learning_rate(step * number, sides.train) for step in range(1, len(used) + 1)]
        early = [plain_learning_rate((step - 1) * number + 1, sides.train) for step in range(1, len(used) + 1)]
        if any(all(close(a, b) for a, b in zip(used, rates, strict=True)) for rates in (late, early)):
            return f"the schedule counts {what}: {number} in a step"
    if all(close(rate, sides.train.lr) for rate in used):
        return "the learning rate's schedule is missing: it is train.lr in every step"
    ratios = [a / b for a, b in zip(used, due, strict=False) if b]
    if ratios and all(close(ratio, ratios[0]) for ratio in ratios):
        return f"{number_words(ratios[0])} times the learning rate in every step"
    return "the learning rate differs from its closed form"
