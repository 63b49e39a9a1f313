"""Fit a tensor as a weighted sum of the contributions of each micro-batch on each data-parallel rank.

The reference records these contributions, which sum to the gradient. A faulty layout usually computes a different
combination, such as a single data-parallel rank or a micro-batch counted twice. The weights are recovered by least
squares if the tensor has more elements than contributions, otherwise by trying combinations typical of faults. A fit
is accepted only if its residual is at rounding level, so noise is never attributed to a cause.

Shape suffixes: d data-parallel rank, m micro-batch, n element.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property

import numpy as np

from meshwright.prove.compare.tensor_shards import Array, coordinates, max_magnitude
from meshwright.prove.diagnose.factors import CLOSE, LayoutCounts, close, factor_cause

RESIDUAL = 1e-11
"""Maximum residual relative to the largest value: the rounding error of a few thousand additions."""
PROGRESS = 1e-3
"""Maximum residual relative to the error to explain: a fit with a factor of 1 + 1e-12 explains nothing."""
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
    factor = common_factor(problem)
    if factor is not None:
        return np.full(shape, factor)
    if num_contributions == 1:
        return None
    guess = _least_squares(problem) if problem.num_distinct >= num_contributions + MIN_SPARE else None
    guess = _fit_typical(problem) if guess is None else guess
    return None if guess is None or (guess == 1.0).all() else guess.reshape(shape)


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
