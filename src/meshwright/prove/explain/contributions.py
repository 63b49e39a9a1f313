"""Fit wrong values as weighted sums of what micro-batches of data-parallel ranks contribute, and tell what the weights
mean: contributions that are missing, counted twice, of another rank, or averaged over the wrong number.

A fit counts only if its residual is rounding, and the weights are of a kind that a fault has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property

import numpy as np

from meshwright.prove.judge.tensors import CLOSE, NOTHING_FITS, Array, LayoutCounts, close, factor_cause, max_magnitude
from meshwright.prove.judge.verdicts import NOISY_PROGRESS, NOISY_RESIDUAL, PROGRESS, RESIDUAL
from meshwright.prove.result import (
    EVERYWHERE,
    Diagnosis,
    FaultKind,
    coordinates,
    index_words,
    number_words,
    rank_words,
    scope_words,
)
from meshwright.units import join_words

MAX_LISTED = 4
NUM_DIGITS = 12
"""Decimals of relative weights: more are rounding, and would tell causes apart that are one."""
SymptomAndCause = tuple[str, str]
"""The texts of a diagnosis."""


def weights_diagnosis(weights: dict[int, Array], informative_ranks: list[int], counts: LayoutCounts) -> Diagnosis:
    """Diagnose wrong ranks from the `weights` of their contributions; other informative ranks are assumed correct."""
    scope = scope_words(weights, informative_ranks, counts.axes)
    only = "" if scope == EVERYWHERE else f", {scope}"
    first = next(iter(weights.values()))
    uniform = all(np.array_equal(first, other) for other in weights.values())
    if uniform and (first == first.flat[0]).all():
        return scale_diagnosis(float(first.flat[0]), scope, counts)
    # If all wrong ranks share one data-parallel rank, its contribution is their local one.
    is_one_dp_rank = len({counts.part(rank) for rank in weights}) == 1
    local = _local_words(weights, counts) if is_one_dp_rank or not uniform else None
    if local is not None:
        return Diagnosis(FaultKind.SUM_MISSING, local[0] + only, local[1])
    if uniform:
        symptom, cause = uniform_words(first, counts)
        numbers, is_missing = _odd_microbatches(first)
        return Diagnosis(FaultKind.CONTRIBUTIONS, symptom + only, cause, microbatches=numbers, is_missing=is_missing)
    return _differing_ranks(weights, only, counts)


def scale_diagnosis(factor: float, scope: str, counts: LayoutCounts, *, only_axis: str | None = None) -> Diagnosis:
    """Diagnose values that are an exact multiple of the reference."""
    symptom = f"{number_words(factor)} × the reference {scope}"
    cause = factor_cause(factor, counts, only_axis=only_axis) or NOTHING_FITS
    if only_axis is None and cause.startswith("averaged over pp"):
        cause = "gradients of a stage's own parameters are not reduced over pp"
        return Diagnosis(FaultKind.UNRECOGNISED, symptom, cause, factor=factor)
    return Diagnosis(FaultKind.SCALED, symptom, cause, factor=factor)


def uniform_words(weights: Array, counts: LayoutCounts) -> SymptomAndCause:
    """Describe weights shared by all wrong ranks."""
    unit = _unit(weights)
    base = np.round(weights / unit, NUM_DIGITS)
    if _constant_along(base, 1):
        words = _dp_rank_words(base[:, 0], counts)
    elif _constant_along(base, 0):
        words = _microbatch_words(base[0])
    else:
        words = _mixed_words(base, counts)
    symptom, cause = words
    if unit != 1.0:
        symptom += f", and the rest scaled by {number_words(unit)}"
        cause += f"; in addition, {factor_cause(unit, counts) or NOTHING_FITS}"
    return symptom, cause


def _unit(weights: Array) -> float:
    """Return the common factor to divide by to get integer counts: 0.5 for [0.5, 0, 0.5], 3 for [3, 3, 0].

    The factor is 1 for [2, 0, 1] and [3, 0, 0]: the total is correct, but some contributions replace others. It is 1,
    too, if no other weight is more frequent, as for [1, 0.5]: some contributions are right.
    """
    values, nums = np.unique(weights[weights != 0], return_counts=True)
    is_whole = bool((weights >= 0).all() and (weights == np.round(weights)).all())
    if is_whole and (len(values) != 1 or values[0] * nums[0] == weights.size):
        return 1.0
    usual = values[nums == nums.max()]
    return 1.0 if np.isclose(usual, 1.0, rtol=CLOSE).any() else float(usual[0])


def _constant_along(base: Array, dim: int) -> bool:
    return base.shape[1 - dim] > 1 and bool((base == base.take([0], axis=dim)).all())


def _dp_rank_words(base: Array, counts: LayoutCounts) -> SymptomAndCause:
    """Describe weights that vary only over data-parallel ranks."""
    lost, extra = _lost_and_extra(base)
    if lost and extra:
        a, b = _part_list(lost, counts), _part_list(extra, counts)
        symptom = f"{a} missing and {b} counted {_times(base[extra[0]])}"
        return symptom, f"{_ranks_of(lost, counts)} read the {'tokens' if counts.by_context else 'samples'} of {b}"
    if lost:
        plural = ("s", "are") if len(lost) > 1 else ("", "is")
        symptom = f"the contribution{plural[0]} of {_part_list(lost, counts)} {plural[1]} missing"
        left = [k for k in range(len(base)) if base[k] != 0]
        return symptom, _missing_cause(left, lost, counts)
    if extra and len({float(base[k]) for k in extra}) == 1:
        symptom = f"{_part_list(extra, counts)} counted {_times(base[extra[0]])}"
        return symptom, f"contributions of {_ranks_of(extra, counts)} enter the sum more than once"
    odd = [k for k in range(len(base)) if base[k] != 1]
    if len(odd) < len(base) and len({float(base[k]) for k in odd}) == 1:
        whose = f"the contribution{'s' if len(odd) > 1 else ''} of {_part_list(odd, counts)}"
        times = number_words(float(base[odd[0]]))
        return (
            f"{whose} × {times}",
            f"the loss or its gradient is multiplied on {_ranks_of(odd, counts)} before the sum",
        )
    return _weight_list(base[:, None], counts)


def unequal_units(weights: Array, units: Array) -> str | None:
    """Recognise weights of contributions that are divided by the units of a rank or micro-batch, not of the batch.

    Args:
        weights: [data-parallel rank, micro-batch]
        units: numbers of loss units, such as targets, alike.
    """
    if weights.shape != units.shape or (units == units.flat[0]).all() or not (units > 0).all():
        return None
    by_rank, total = units.sum(1, keepdims=True), units.sum()
    for divisor, parts, whose in (
        (by_rank, len(units), "data-parallel rank"),
        (units, units.size, "micro-batch"),
        (units.sum(0, keepdims=True), units.shape[1], "micro-batch of all ranks"),
    ):
        for times, how in ((1.0 / parts, "averaged"), (1.0, "summed")):
            if np.allclose(weights, np.broadcast_to(times * total / divisor, weights.shape), rtol=1e-6, atol=0.0):
                low, high = int(divisor.min()), int(divisor.max())
                return (
                    f"means over the targets of each {whose}, of which there are {low} to {high}, are {how}: divide "
                    "the sum of the losses by the number of targets in the global batch"
                )
    return None


def _odd_microbatches(weights: Array) -> tuple[tuple[int, ...], bool]:
    """Return the micro-batches missing or duplicated on every data-parallel rank, and whether they are missing."""
    if weights.shape[1] == 1 or (weights != weights[:1]).any():
        return (), False
    lost, extra = _lost_and_extra(weights[0])
    return ((), False) if lost and extra else (tuple(lost or extra), bool(lost))


def _missing_cause(left: list[int], lost: list[int], counts: LayoutCounts) -> str:
    for rank in range(counts.axes.num_ranks()):
        for mask, missing in local_masks(counts, rank):
            if np.flatnonzero(mask[:, 0]).tolist() == left:
                included = f"{_part_list(left, counts)} ({_ranks_of(left, counts)})"
                return f"the sum over {' and '.join(missing)} is missing: only contributions of {included} are included"
    return f"the sum does not include {_ranks_of(lost, counts)}"


def _microbatch_words(base: Array) -> SymptomAndCause:
    """Describe weights that vary only over micro-batches."""
    lost, extra = _lost_and_extra(base)
    last = len(base) - 1
    if lost and extra and len(lost) == len(extra) == 1:
        symptom = f"micro-batch {lost[0]} is missing and micro-batch {extra[0]} counted {_times(base[extra[0]])}"
        return symptom, "one micro-batch is processed in place of another"
    if lost == list(range(last)):
        times = "" if base[last] == 1 else f", counted {_times(base[last])}"
        return (
            f"only the last micro-batch ({last}) is present{times}",
            "each micro-batch overwrites the gradient of the previous one: accumulation is missing",
        )
    if lost:
        one = len(lost) == 1
        symptom = f"micro-batch{'' if one else 'es'} {index_words(lost)} {'is' if one else 'are'} missing"
        return symptom, f"gradient accumulation skips {'it' if one else 'them'}"
    if extra and len({float(base[k]) for k in extra}) == 1:
        symptom = f"micro-batch {index_words(extra)} counted {_times(base[extra[0]])}"
        return symptom, "gradient accumulation adds it more than once"
    return "micro-batch weights are " + ", ".join(number_words(float(w)) for w in base), "they should be equal"


def _mixed_words(base: Array, counts: LayoutCounts) -> SymptomAndCause:
    """Describe weights that vary over both data-parallel ranks and micro-batches."""
    odd = [d for d in range(len(base)) if (base[d] != 1).any()]
    if len(odd) == 1:
        symptom, cause = _microbatch_words(base[odd[0]])
        return f"for {counts.part_words(odd[0])} ({_ranks_of(odd, counts)}), {symptom}", cause
    if len(odd) < len(base) or not all(np.array_equal(base[d], base[odd[0]]) for d in odd):
        lost, extra = np.argwhere(base == 0), np.argwhere(base == 2)
        if len(lost) == len(extra) == 1 and (base != 1).sum() == 2:
            a, b = (f"micro-batch {m} of {counts.part_words(d)}" for d, m in (lost[0], extra[0]))
            return f"{a} is missing and {b} counted twice", f"{b} replaces {a}"
    return _weight_list(base, counts)


def _weight_list(base: Array, counts: LayoutCounts) -> SymptomAndCause:
    odd = np.argwhere(base != 1)
    listed = [
        f"{counts.part_words(d)} micro-batch {m} × {number_words(float(base[d, m]))}" for d, m in odd[:MAX_LISTED]
    ]
    if len(odd) > MAX_LISTED:
        listed.append(f"{len(odd) - MAX_LISTED} more")
    symptom = "contributions have wrong weights, " + ", ".join(listed)
    return symptom, "contributions enter the sum the wrong number of times"


def _local_words(weights: dict[int, Array], counts: LayoutCounts) -> SymptomAndCause | None:
    """Describe ranks that hold only their own contribution or that of a data-parallel subgroup."""
    num_options = len(local_masks(counts, 0))
    if any(found.shape != (counts.num_parts, counts.num_microbatches) for found in weights.values()):
        return None
    for option in range(num_options):
        missing, factors, columns = local_masks(counts, 0)[option][1], set(), set()
        for rank, found in weights.items():
            mask = local_masks(counts, rank)[option][0]
            inside = found[mask[:, 0] > 0]
            if (found[mask == 0] != 0).any() or (inside != inside[0]).any():
                break
            factors.add(_unit(inside))
            columns.add(tuple((inside[0] / _unit(inside)).tolist()))
        else:
            if len(factors) == len(columns) == 1:
                return _missing_sum_words(missing, factors.pop(), np.array(columns.pop()), counts)
    return None


def _missing_sum_words(missing: tuple[str, ...], factor: float, column: Array, counts: LayoutCounts) -> SymptomAndCause:
    over = " and ".join(missing)
    size = 1
    for axis in missing:
        size *= counts.axes.size(axis)
    held = (
        f"its local contribution{', that of its own tokens' if counts.by_context else ''}"
        if set(missing) >= {axis for axis in counts.data_axes if counts.axes.size(axis) > 1}
        else f"the contributions at its own {over} coordinate"
    )
    reduction, times = "sum", ""
    # _unit treats [2, 2] as counts of two; here it is a factor.
    if (column == column[0]).all():
        factor, column = factor * float(column[0]), column / column[0]
    if close(factor, size, counts.rounding):
        reduction, times = "mean", f"{number_words(factor)} × "
    elif factor != 1.0:
        times = f"{number_words(factor)} × "
    symptom = f"each rank holds only {times}{held}"
    cause = f"the {reduction} over {over} is missing"
    if times and reduction == "sum":
        cause += f", and {factor_cause(factor, counts) or NOTHING_FITS}"
    if (column != 1).any():
        cause += "; in addition, " + ": ".join(_microbatch_words(column))
    return symptom, cause


def _differing_ranks(weights: dict[int, Array], only: str, counts: LayoutCounts) -> Diagnosis:
    groups: dict[bytes, list[int]] = {}
    for rank, found in weights.items():
        groups.setdefault(found.tobytes(), []).append(rank)
    listed = []
    for ranks in list(groups.values())[:MAX_LISTED]:
        found = weights[ranks[0]]
        constant = bool((found == found.flat[0]).all())
        multiple = f"{number_words(float(found.flat[0]))} × the reference"
        listed.append(f"{rank_words(ranks)}: {multiple if constant else uniform_words(found, counts)[0]}")
    symptom = "different combinations of contributions on different ranks" + only
    return Diagnosis(FaultKind.CONTRIBUTIONS, symptom, "; ".join(listed))


def _lost_and_extra(base: Array) -> tuple[list[int], list[int]]:
    """Return the indices of weights of 0 and of 2 or more; both are empty if a weight is not an integer count."""
    if (base < 0).any() or (base != np.round(base)).any():
        return [], []
    return np.flatnonzero(base == 0).tolist(), np.flatnonzero(base >= 2).tolist()


def _times(weight: float) -> str:
    return "twice" if weight == 2 else f"{weight:.0f} times"


def _part_list(parts: list[int], counts: LayoutCounts) -> str:
    if counts.by_context and counts.axes.data_parallel() > 1:
        return join_words([counts.part_words(part) for part in parts])
    name, plural = "cp" if counts.by_context else "data-parallel", "s" if len(parts) > 1 else ""
    return f"{name} rank{plural} {join_words([str(part) for part in parts])}"


def _ranks_of(parts: list[int], counts: LayoutCounts) -> str:
    return rank_words(rank for rank in range(counts.axes.num_ranks()) if counts.part(rank) in parts)


SIGNIFICANT_DIGITS = 9
"""Number of matching decimal digits that rules out a chance fit."""
MIN_SPARE = 4
"""Minimum number of elements in excess of the unknowns for least squares."""
MAX_PLAIN_FACTOR = 16
"""Largest integer factor accepted for a single element without a known cause."""
MAX_FIT_ELEMENTS = 2048
"""Maximum number of elements in the least-squares fit; the solution is checked on all elements."""


@dataclass(frozen=True, eq=False)
class FitProblem:
    """Local values and the contributions to fit to them."""

    value_n: Array
    contributions_dmn: Array
    """Contributions; they sum to the expected values."""
    counts: LayoutCounts
    num_distinct: int
    """Number of elements not counting replicas, which add no equations."""
    rank: int | None = None
    """Rank of the elements if they belong to one data-parallel rank; enables patterns relative to that rank."""
    max_error: float = math.inf
    """Upper bound on the error to explain, if smaller than the error of `value_n`."""
    noise: float = 0.0
    """Relative tolerance of norms if values are rounded: weights are then the plausible ones next to the fitted."""

    @cached_property
    def flat_contributions(self) -> Array:
        return self.contributions_dmn.reshape(-1, self.value_n.size)

    @cached_property
    def expected_n(self) -> Array:
        return np.asarray(self.flat_contributions.sum(axis=0))

    @cached_property
    def error(self) -> float:
        return min(self.max_error, max_magnitude(self.value_n - self.expected_n))

    def limit(self, size: float) -> float:
        """Return the maximum acceptable residual for values of magnitude `size`."""
        rounding = self.counts.rounding
        return min(max(RESIDUAL, rounding) * size, max(PROGRESS, rounding) * self.error)


def is_significant(num_spare: int, error: float, residual: float) -> bool:
    """Return whether reducing `error` to `residual` on `num_spare` spare elements is too unlikely to be chance."""
    return (
        num_spare > 0
        and error > 0.0
        and (residual == 0.0 or num_spare * math.log10(error / residual) >= SIGNIFICANT_DIGITS)
    )


def common_factor(problem: FitProblem) -> float | None:
    """Return c such that value = c · expected, or None; with few elements, c must have a known cause."""
    value_n, expected_n = problem.value_n, problem.expected_n
    energy = float(expected_n @ expected_n)
    if energy == 0.0 or not np.isfinite(energy):
        return None
    fitted = float(value_n @ expected_n) / energy
    limit = problem.limit(max(max_magnitude(value_n), max_magnitude(expected_n)))
    for factor in (simplified(fitted, problem.counts.rounding), fitted):
        if factor not in (0.0, 1.0) and max_magnitude(value_n - factor * expected_n) <= limit:
            break
    else:
        return None
    if is_significant(problem.num_distinct - 1, problem.error, limit):
        return factor
    is_plain = any(c <= MAX_PLAIN_FACTOR and c == round(c) for c in (abs(factor), 1 / abs(factor)))
    return factor if is_plain or factor_cause(abs(factor), problem.counts) else None


def contribution_weights(problem: FitProblem) -> Array | None:
    """Return weights w such that value = Σ w[d, m] · contributions[d, m], or None."""
    shape, num_contributions = problem.contributions_dmn.shape[:2], len(problem.flat_contributions)
    if problem.noise:
        found = _plausible(problem)
        return None if found is None else found.reshape(shape)
    factor = common_factor(problem)
    if factor is not None:
        return np.full(shape, factor)
    if num_contributions == 1:
        return None
    guess = _least_squares(problem) if problem.num_distinct >= num_contributions + MIN_SPARE else None
    guess = _fit_typical(problem) if guess is None else guess
    return None if guess is None or (guess == 1.0).all() else guess.reshape(shape)


def _plausible(problem: FitProblem) -> Array | None:
    """Return the plausible weights next to fitted ones that explain rounded values."""
    value_n, parts, own_n = problem.value_n, problem.flat_contributions, problem.expected_n
    known = np.array([0.0, -1.0, *problem.counts.factors()])

    def snapped(weights: Array) -> Array:
        return np.asarray(known[np.abs(known[None] - weights[:, None]).argmin(1)], dtype=np.float64)

    energy = float(own_n @ own_n)
    candidates = [snapped(np.full(len(parts), float(value_n @ own_n) / energy))] if energy else []
    if value_n.size > 2 * len(parts):
        candidates.append(snapped(np.asarray(np.linalg.lstsq(parts.T, value_n, rcond=None)[0], dtype=np.float64)))
    error = float(np.linalg.norm(value_n - own_n))
    for weights in candidates:
        target_n = weights @ parts
        left = float(np.linalg.norm(value_n - target_n))
        size = max(float(np.linalg.norm(target_n)), float(np.linalg.norm(own_n)))
        if (weights != 1).any() and left <= NOISY_RESIDUAL * problem.noise * size and left <= NOISY_PROGRESS * error:
            return weights
    return None


def stage_weights(problem: FitProblem) -> Array | None:
    """Return the least-squares weights of per-stage contributions, or None if there are too few elements."""
    found = _least_squares(problem) if problem.num_distinct >= len(problem.flat_contributions) + MIN_SPARE else None
    return None if found is None or (found == 1.0).all() else found


def _least_squares(problem: FitProblem) -> Array | None:
    rows = np.linspace(0, problem.value_n.size - 1, min(problem.value_n.size, MAX_FIT_ELEMENTS)).astype(int)
    contributions = problem.flat_contributions[:, rows].T
    weights, _, rank, _ = np.linalg.lstsq(contributions, problem.value_n[rows], rcond=1e-9)
    if rank < len(problem.flat_contributions):
        return None
    rounded = np.array([simplified(float(w), problem.counts.rounding) for w in weights])
    return rounded if _explains(rounded, problem) else None


def _explains(weights: Array, problem: FitProblem) -> bool:
    size = max(
        max_magnitude(problem.value_n), max_magnitude(problem.flat_contributions) * max(1.0, max_magnitude(weights))
    )
    return max_magnitude(problem.value_n - weights @ problem.flat_contributions) <= problem.limit(size)


def simplified(weight: float, rounding: float = 0.0) -> float:
    """Round a fitted weight to the nearest simple fraction if it is close to one."""
    for largest in (1, 16, 256):
        simple = float(Fraction(weight).limit_denominator(largest))
        if close(weight, simple, rounding) or abs(weight - simple) < CLOSE:
            return simple
    return weight


def _fit_typical(problem: FitProblem) -> Array | None:
    """Return the first typical combination that fits; candidates are screened on the largest elements first."""
    value_n, contributions = problem.value_n, problem.flat_contributions
    elements = np.argsort(-np.abs(contributions).max(axis=0))[:64]
    patterns = _typical_weights(problem.counts, problem.rank)
    for factor in problem.counts.factors():
        weights = patterns * factor
        residual = np.abs(value_n[elements] - weights @ contributions[:, elements]).max(axis=1)
        size = max(max_magnitude(value_n), max_magnitude(contributions) * 2 * max(1.0, factor))
        for at in np.flatnonzero(residual <= max(RESIDUAL, problem.counts.rounding) * size):
            if _explains(weights[at], problem):
                return np.asarray(weights[at])
    return None


@cache
def _typical_weights(counts: LayoutCounts, rank: int | None) -> Array:
    """Return `typical_weights` as an array: [pattern, contribution]."""
    return np.array([pattern.reshape(-1) for pattern in typical_weights(counts, rank)])


def typical_weights(counts: LayoutCounts, rank: int | None) -> Iterator[Array]:
    """Yield weights that are typical of faults, simplest first."""
    dp_size, micro = counts.num_parts, counts.num_microbatches
    ones = np.ones((dp_size, micro))
    columns = list(_line_patterns(micro, 1, ones))
    if rank is not None:
        for mask, _ in local_masks(counts, rank):
            yield mask
            yield from (mask * column for column in columns)
    yield from _line_patterns(dp_size, 0, ones)
    yield from columns
    for size in sorted(set(counts.axes.used().values())) if micro > 1 else ():  # see `accumulated_sum`
        yield ones * float(size) ** np.arange(micro)[::-1]
    for dp_rank in range(dp_size):
        row = np.arange(dp_size)[:, None] == dp_rank
        yield from (np.where(row, column, ones) for column in columns)
    for a, b in itertools.permutations(range(dp_size * micro), 2):
        weights = ones.copy().reshape(-1)
        weights[a], weights[b] = 2.0, 0.0
        yield weights.reshape(dp_size, micro)


def local_masks(counts: LayoutCounts, rank: int) -> list[tuple[Array, tuple[str, ...]]]:
    """Return masks of the contributions left on `rank` if the sum over some data axes is missing, with these axes."""
    used, position = counts.axes.used(), coordinates(counts.axes)[rank]
    data = tuple(axis for axis in counts.data_axes if axis in used)
    sizes = tuple(counts.axes.size(axis) for axis in counts.data_axes)
    found = []
    for missing in (chosen for num in range(1, len(data) + 1) for chosen in itertools.combinations(data, num)):
        mask = np.zeros((counts.num_parts, counts.num_microbatches))
        for part in range(len(mask)):
            at = dict(zip(counts.data_axes, np.unravel_index(part, sizes), strict=True))
            mask[part] = float(all(at[axis] == position[axis] for axis in missing))
        found.append((mask, missing))
    return found


def _line_patterns(num: int, dim: int, ones: Array) -> Iterator[Array]:
    """Yield weights for one of `num` slices along `dim` being alone, missing, duplicated, or in place of another."""

    def broadcast(weights: Array) -> Array:
        return ones * (weights[:, None] if dim == 0 else weights[None, :])

    if num == 1:
        return
    unit = np.eye(num)
    for k in range(num):
        yield broadcast(unit[k])
        yield broadcast(1.0 - unit[k])
        yield broadcast(1.0 + unit[k])
    for a, b in itertools.permutations(range(num), 2):
        yield broadcast(np.ones(num) + unit[a] - unit[b])
