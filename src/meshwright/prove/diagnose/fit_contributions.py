"""Fit of a tensor by the contributions of each micro-batch of each data-parallel rank.

The reference records these contributions, which sum to the gradient. A faulty layout usually holds another combination
of them: one data-parallel rank only, or a micro-batch twice. The weights are recovered exactly, by least squares if the
tensor has more elements than there are contributions, otherwise by trying combinations typical of faults. A fit is
accepted only if the residual is rounding error, so noise is never given a cause.

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
"""Largest residual relative to the largest value: the rounding error of a few thousand additions."""
PROGRESS = 1e-3
"""Largest residual relative to the error to explain: a fit with a factor of 1 + 1e-12 explains nothing."""
SIGNIFICANT_DIGITS = 9
"""Decimal digits that must match before a fit is not attributed to chance."""
MIN_SPARE = 4
"""Number of elements beyond the number of unknowns that least squares needs."""
MAX_PLAIN_FACTOR = 16
"""Largest integer factor accepted for a single element without a known cause."""
MAX_FIT_ELEMENTS = 2048
"""Number of elements used by least squares; the solution is checked on all elements."""


@dataclass(frozen=True, eq=False)
class FitProblem:
    """Local values and the contributions to fit them with."""

    value_n: Array
    contributions_dmn: Array
    """Contributions, which sum to the expected values."""
    counts: LayoutCounts
    num_distinct: int
    """Number of elements without replicas, which add no equations."""
    rank: int | None = None
    """Rank, if all elements belong to one data-parallel rank; allows weights relative to that rank."""
    max_error: float = math.inf
    """Upper bound of the error to explain, if smaller than that of `value_n`."""

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
        """Return the largest residual of an acceptable fit with values of magnitude `size`."""
        return min(RESIDUAL * size, PROGRESS * self.error)


def is_significant(num_spare: int, error: float, residual: float) -> bool:
    """Return whether a fit that reduces `error` to `residual` on `num_spare` spare elements is not chance."""
    return (
        num_spare > 0
        and error > 0.0
        and (residual == 0.0 or num_spare * math.log10(error / residual) >= SIGNIFICANT_DIGITS)
    )


def common_factor(problem: FitProblem) -> float | None:
    """Return c with value = c · expected, or None; with few elements only factors with a known cause count."""
    value_n, expected_n = problem.value_n, problem.expected_n
    energy = float(expected_n @ expected_n)
    if energy == 0.0 or not np.isfinite(energy):
        return None
    fitted = float(value_n @ expected_n) / energy
    limit = problem.limit(max(max_magnitude(value_n), max_magnitude(expected_n)))
    for factor in (_rounded(fitted), fitted):
        if factor not in (0.0, 1.0) and max_magnitude(value_n - factor * expected_n) <= limit:
            break
    else:
        return None
    if is_significant(problem.num_distinct - 1, problem.error, limit):
        return factor
    is_plain = any(c <= MAX_PLAIN_FACTOR and c == round(c) for c in (abs(factor), 1 / abs(factor)))
    return factor if is_plain or factor_cause(abs(factor), problem.counts) else None


def contribution_weights(problem: FitProblem) -> Array | None:
    """Return weights w with value = Σ w[d, m] · contributions[d, m], or None."""
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
    rounded = np.array([_rounded(float(w)) for w in weights])
    return rounded if _explains(rounded, problem) else None


def _explains(weights: Array, problem: FitProblem) -> bool:
    size = max(
        max_magnitude(problem.value_n), max_magnitude(problem.flat_contributions) * max(1.0, max_magnitude(weights))
    )
    return max_magnitude(problem.value_n - weights @ problem.flat_contributions) <= problem.limit(size)


def _rounded(weight: float) -> float:
    """Round a fitted weight to a nearby simple fraction, if there is one."""
    simple = float(Fraction(weight).limit_denominator(256))
    return simple if close(weight, simple) or abs(weight - simple) < CLOSE else weight


def _fit_typical(problem: FitProblem) -> Array | None:
    """Return the first typical combination that fits; screened on the largest elements, then checked on all."""
    value_n, contributions = problem.value_n, problem.flat_contributions
    elements = np.argsort(-np.abs(contributions).max(axis=0))[:64]
    patterns = _typical_weights(problem.counts, problem.rank)
    for factor in problem.counts.factors():
        weights = patterns * factor
        residual = np.abs(value_n[elements] - weights @ contributions[:, elements]).max(axis=1)
        size = max(max_magnitude(value_n), max_magnitude(contributions) * 2 * max(1.0, factor))
        for at in np.flatnonzero(residual <= RESIDUAL * size):
            if _explains(weights[at], problem):
                return np.asarray(weights[at])
    return None


@cache
def _typical_weights(counts: LayoutCounts, rank: int | None) -> Array:
    """Return the typical weights as an array: [pattern, contribution]."""
    return np.array([pattern.reshape(-1) for pattern in typical_weights(counts, rank)])


def typical_weights(counts: LayoutCounts, rank: int | None) -> Iterator[Array]:
    """Yield weights that faults typically produce, simplest first."""
    dp_size, micro = counts.axes.data_parallel(), counts.num_microbatches
    ones = np.ones((dp_size, micro))
    columns = list(_line_patterns(micro, 1, ones))
    if rank is not None:
        for mask, _ in local_masks(counts, rank):
            yield mask
            yield from (mask * column for column in columns)
    yield from _line_patterns(dp_size, 0, ones)
    yield from columns
    for dp_rank in range(dp_size):
        row = np.arange(dp_size)[:, None] == dp_rank
        yield from (np.where(row, column, ones) for column in columns)
    for a, b in itertools.permutations(range(dp_size * micro), 2):
        weights = ones.copy().reshape(-1)
        weights[a], weights[b] = 2.0, 0.0
        yield weights.reshape(dp_size, micro)


def local_masks(counts: LayoutCounts, rank: int) -> list[tuple[Array, tuple[str, ...]]]:
    """Return masks of the contributions that `rank` holds without the sum over some data axes, and those axes."""
    used, position = counts.axes.used(), coordinates(counts.axes)[rank]
    data = tuple(axis for axis in ("dp_replicate", "dp_shard") if axis in used)
    found = []
    for missing in (*((axis,) for axis in data), *((data,) if len(data) == 2 else ())):
        mask = np.zeros((counts.axes.data_parallel(), counts.num_microbatches))
        for dp_rank in range(len(mask)):
            at = dict(zip(("dp_replicate", "dp_shard"), divmod(dp_rank, counts.axes.dp_shard), strict=True))
            mask[dp_rank] = float(all(at[axis] == position[axis] for axis in missing))
        found.append((mask, missing))
    return found


def _line_patterns(num: int, dim: int, ones: Array) -> Iterator[Array]:
    """Yield weights where one of `num` slices along `dim` is alone, missing, duplicated or replaces another."""

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
