"""Finds how much of each (share, micro-batch) cell of the batch is in a tensor.

The reference keeps the gradient's parts: one for each data-parallel share and micro-batch, adding up to the
gradient. A faulty layout usually holds another combination of the same parts: one share only, a micro-batch twice.
Those weights are recovered exactly, by least squares where a tensor has more elements than there are cells, and
by trying the combinations that faults produce where it has not. An answer counts only when what is left over is
rounding: noise has no such answer, so nothing is made up for it.

Legend: d share, m micro-batch, n element.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property

import numpy as np

from meshwright.prove.compare.tensor_shards import Array, coordinates, largest
from meshwright.prove.diagnose.factors import CLOSE, Counts, close, factor_cause

RESIDUAL = 1e-11
"""What may be left over, relative to the largest number involved: rounding of a few thousand additions."""
PROGRESS = 1e-3
"""… and relative to the error that is explained: a fit to 1 + 1e-12 explains nothing."""
DIGITS = 9
"""Decimal digits that chance would have to guess before a fit is believed."""
SPARE = 4
"""Places beyond the number of unknowns before least squares is believed."""
MAX_COUNT = 16
"""The largest factor that a single number may have without a cause."""
MAX_ROWS = 2048
"""Elements least squares looks at; the answer is checked on all."""


@dataclass(frozen=True, eq=False)
class Puzzle:
    """Numbers that ranks hold, and the cells they may be made of."""

    value_n: Array
    parts_dmn: Array
    """The cells; their sum is what was due."""
    counts: Counts
    num_places: int
    """Elements without their copies: a copy is not another equation."""
    rank: int | None = None
    """Given when all elements are of ranks with one data-parallel share: weights that depend on whose share it is can
    be tried then."""
    most_error: float = math.inf
    """The error that needs an explanation, where it is smaller than that of `value_n`."""

    @cached_property
    def cells(self) -> Array:
        return self.parts_dmn.reshape(-1, self.value_n.size)

    @cached_property
    def due_n(self) -> Array:
        return np.asarray(self.cells.sum(axis=0))

    @cached_property
    def error(self) -> float:
        return min(self.most_error, largest(self.value_n - self.due_n))

    def limit(self, size: float) -> float:
        """What an explanation in numbers of `size` may leave over."""
        return min(RESIDUAL * size, PROGRESS * self.error)


def believable(num_spare: int, error: float, left: float) -> bool:
    """Whether `num_spare` numbers that are right to `left` where they were wrong by `error` can't be chance."""
    return num_spare > 0 and error > 0.0 and (left == 0.0 or num_spare * math.log10(error / left) >= DIGITS)


def scale_factor(puzzle: Puzzle) -> float | None:
    """The c of value = c · due, or None. Of too few places only factors that have a cause count."""
    value_n, due_n = puzzle.value_n, puzzle.due_n
    energy = float(due_n @ due_n)
    if energy == 0.0 or not np.isfinite(energy):
        return None
    raw = float(value_n @ due_n) / energy
    limit = puzzle.limit(max(largest(value_n), largest(due_n)))
    for factor in (_rounded(raw), raw):
        if factor not in (0.0, 1.0) and largest(value_n - factor * due_n) <= limit:
            break
    else:
        return None
    if believable(puzzle.num_places - 1, puzzle.error, limit):
        return factor
    plain = any(c <= MAX_COUNT and c == round(c) for c in (abs(factor), 1 / abs(factor)))
    return factor if plain or factor_cause(abs(factor), puzzle.counts) else None


def cell_weights(puzzle: Puzzle) -> Array | None:
    """The weights w of value = Σ w[d, m] · parts[d, m], or None."""
    shape, num_cells = puzzle.parts_dmn.shape[:2], len(puzzle.cells)
    factor = scale_factor(puzzle)
    if factor is not None:
        return np.full(shape, factor)
    if num_cells == 1:
        return None
    guess = _least_squares(puzzle) if puzzle.num_places >= num_cells + SPARE else None
    guess = _tried(puzzle) if guess is None else guess
    return None if guess is None or (guess == 1.0).all() else guess.reshape(shape)


def part_weights(puzzle: Puzzle) -> Array | None:
    """The weights of parts that are no cells of the batch, where there are places enough to tell."""
    found = _least_squares(puzzle) if puzzle.num_places >= len(puzzle.cells) + SPARE else None
    return None if found is None or (found == 1.0).all() else found


def _least_squares(puzzle: Puzzle) -> Array | None:
    rows = np.linspace(0, puzzle.value_n.size - 1, min(puzzle.value_n.size, MAX_ROWS)).astype(int)
    cells = puzzle.cells[:, rows].T
    weights, _, rank, _ = np.linalg.lstsq(cells, puzzle.value_n[rows], rcond=1e-9)
    if rank < len(puzzle.cells):
        return None
    rounded = np.array([_rounded(float(w)) for w in weights])
    return rounded if _explains(rounded, puzzle) else None


def _explains(weights: Array, puzzle: Puzzle) -> bool:
    size = max(largest(puzzle.value_n), largest(puzzle.cells) * max(1.0, largest(weights)))
    return largest(puzzle.value_n - weights @ puzzle.cells) <= puzzle.limit(size)


def _rounded(weight: float) -> float:
    """The simple fraction next to a fitted weight, or the weight."""
    simple = float(Fraction(weight).limit_denominator(256))
    return simple if close(weight, simple) or abs(weight - simple) < CLOSE else weight


def _tried(puzzle: Puzzle) -> Array | None:
    """The first usual combination that fits. Screened on the few elements that matter most, then checked on all."""
    value_n, cells = puzzle.value_n, puzzle.cells
    few = np.argsort(-np.abs(cells).max(axis=0))[:64]
    patterns = _usual_weights(puzzle.counts, puzzle.rank)
    for factor in puzzle.counts.factors():
        weights = patterns * factor
        left = np.abs(value_n[few] - weights @ cells[:, few]).max(axis=1)
        size = max(largest(value_n), largest(cells) * 2 * max(1.0, factor))
        for at in np.flatnonzero(left <= RESIDUAL * size):
            if _explains(weights[at], puzzle):
                return np.asarray(weights[at])
    return None


@cache
def _usual_weights(counts: Counts, rank: int | None) -> Array:
    """[pattern, cell]"""
    return np.array([pattern.reshape(-1) for pattern in usual_weights(counts, rank)])


def usual_weights(counts: Counts, rank: int | None) -> Iterator[Array]:
    """Combinations of cells that faults produce, plain ones first."""
    shares, micro = counts.axes.data_parallel(), counts.num_microbatches
    ones = np.ones((shares, micro))
    columns = list(_line_patterns(micro, 1, ones))
    if rank is not None:
        for mask, _ in own_masks(counts, rank):
            yield mask
            yield from (mask * column for column in columns)
    yield from _line_patterns(shares, 0, ones)
    yield from columns
    for share in range(shares):
        row = np.arange(shares)[:, None] == share
        yield from (np.where(row, column, ones) for column in columns)
    for a, b in itertools.permutations(range(shares * micro), 2):
        weights = ones.copy().reshape(-1)
        weights[a], weights[b] = 2.0, 0.0
        yield weights.reshape(shares, micro)


def own_masks(counts: Counts, rank: int) -> list[tuple[Array, tuple[str, ...]]]:
    """The shares whose parts `rank` has when the sum over some data axes is missing, and those axes."""
    used, position = counts.axes.used(), coordinates(counts.axes)[rank]
    data = tuple(axis for axis in ("dp_replicate", "dp_shard") if axis in used)
    found = []
    for missing in (*((axis,) for axis in data), *((data,) if len(data) == 2 else ())):
        mask = np.zeros((counts.axes.data_parallel(), counts.num_microbatches))
        for share in range(len(mask)):
            at = dict(zip(("dp_replicate", "dp_shard"), divmod(share, counts.axes.dp_shard), strict=True))
            mask[share] = float(all(at[axis] == position[axis] for axis in missing))
        found.append((mask, missing))
    return found


def _line_patterns(num: int, dim: int, ones: Array) -> Iterator[Array]:
    """One of `num` lines along `dim` alone, lost, counted twice, or in place of another."""

    def laid(weights: Array) -> Array:
        return ones * (weights[:, None] if dim == 0 else weights[None, :])

    if num == 1:
        return
    unit = np.eye(num)
    for k in range(num):
        yield laid(unit[k])
        yield laid(1.0 - unit[k])
        yield laid(1.0 + unit[k])
    for a, b in itertools.permutations(range(num), 2):
        yield laid(np.ones(num) + unit[a] - unit[b])
