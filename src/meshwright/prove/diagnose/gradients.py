"""Why a gradient is wrong: from ratios, from the parts of the reference's gradient, and from sums of copies.

Causes are tried from the plain to the intricate, each one checked to rounding, and the first that explains every
wrong piece is named.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from meshwright.prove.compare.result import Diagnosis, Kind
from meshwright.prove.compare.tensor_shards import Array, Piece, difference
from meshwright.prove.diagnose.contributions import scaled, weights_diagnosis
from meshwright.prove.diagnose.factors import NOTHING_FITS, close, factor_cause
from meshwright.prove.diagnose.fit_contributions import SPARE, Puzzle, cell_weights, scale_factor
from meshwright.prove.diagnose.phrases import EVERYWHERE, box_words, number_words, place_words, rank_words
from meshwright.prove.diagnose.shared_parameters import SharedParts, diagnose_shared
from meshwright.prove.diagnose.suspect import (
    Subject,
    copies_differ,
    moved,
    non_finite,
    unrecognised,
    unsound,
    wrong_mask,
)


@dataclass(frozen=True)
class Surroundings:
    """What else is known when a tensor is examined."""

    others: Mapping[str, Array]
    """The reference's tensors of the same sort, by name."""
    samples_wrong: bool = False
    initial_wrong: bool = False
    shared: SharedParts | None = None
    """What stages add to parameters that they share."""

    def words(self) -> str:
        """What makes everything after it wrong; empty when nothing does."""
        return "initial weights that differ" if self.initial_wrong else "wrong samples" if self.samples_wrong else ""


def diagnose_gradient(subject: Subject, around: Surroundings) -> Diagnosis:
    """The likely cause of a wrong gradient."""
    return (
        unsound(subject)
        or non_finite(subject)
        or _no_gradient(subject)
        or _combination(subject)
        or _sum_of_copies(subject)
        or diagnose_shared(subject, around.shared)
        or moved(subject, around.others)
        or _confined(subject)
        or follows(subject, around)
        or copies_differ(subject)
        or unrecognised(subject)
    )


def follows(subject: Subject, around: Surroundings) -> Diagnosis | None:
    """Another finding makes this one inevitable."""
    words = around.words()
    return Diagnosis(Kind.CONSEQUENCE, f"wrong {subject.place()}", f"follows from {words}") if words else None


def _no_gradient(subject: Subject) -> Diagnosis | None:
    if any(piece.value.any() for piece in subject.wrong):
        return None
    place = subject.place()
    whose = "this parameter" if place == EVERYWHERE else f"{rank_words(subject.wrong_ranks)}'s piece of it"
    return Diagnosis(Kind.ZERO, f"zero {place}", f"no gradient reached {whose}")


def _combination(subject: Subject) -> Diagnosis | None:
    """A multiple of the reference, or other shares and micro-batches than all once."""
    weights = weights_by_rank(subject, subject.wrong)
    if weights is None:
        return None
    return weights_diagnosis(weights, subject.speaking, subject.counts)


def weights_by_rank(
    subject: Subject, pieces: Iterable[Piece], *, most_error: float = math.inf
) -> dict[int, Array] | None:
    """How much of each cell the ranks hold, when that explains all `pieces`.

    Pieces are pooled as far as they agree, since a small tensor alone may not have enough elements to tell.

    Args:
        most_error: the error that needs an explanation, where it is smaller than that of `pieces`.
    """
    chosen, axes = list(pieces), subject.counts.axes
    for key in (lambda rank: 0, axes.data_index, lambda rank: rank):
        pools: dict[int, list[Piece]] = defaultdict(list)
        for piece in chosen:
            pools[key(piece.rank)].append(piece)
        found: dict[int, Array] = {}
        for pool in pools.values():
            one_share = len({axes.data_index(piece.rank) for piece in pool}) == 1
            weights = cell_weights(_puzzle(subject, pool, pool[0].rank if one_share else None, most_error))
            if weights is None:
                break
            found |= {piece.rank: weights for piece in pool}
        else:
            return dict(sorted(found.items()))
    return None


def _puzzle(subject: Subject, pool: list[Piece], rank: int | None, most_error: float) -> Puzzle:
    value_n = np.concatenate([piece.value.reshape(-1) for piece in pool])
    parts = subject.due[None, None] if subject.parts is None else subject.parts
    inside = []
    for piece in pool:
        inside.append(parts[(slice(None), slice(None), *piece.box())].reshape(*parts.shape[:2], -1))
    num_places = sum({(piece.start, piece.stop): piece.value.size for piece in pool}.values())
    return Puzzle(value_n, np.concatenate(inside, axis=2), subject.counts, num_places, rank, most_error)


def _sum_of_copies(subject: Subject) -> Diagnosis | None:
    """Copies that differ along some axes and add up to the reference there: the sum was not done."""
    apart = [gap.axis for gap in subject.wide_gaps]
    for num in range(1, len(apart) + 1):
        for chosen in itertools.combinations(apart, num):
            cause = _sum_cause(subject, chosen)
            if cause is not None:
                gap = next(gap for gap in subject.wide_gaps if gap.axis in chosen)
                seen = f"replicas differ between {rank_words(gap.ranks)} along {' and '.join(chosen)}"
                return Diagnosis(Kind.SUM_MISSING, seen, cause, f"by up to {gap.largest:.2g} at {list(gap.index)}")
    return None


def _sum_cause(subject: Subject, chosen: tuple[str, ...]) -> str | None:
    wrong = {id(piece) for piece in subject.wrong}
    lines = [line for line in subject.assembly.lines(chosen) if any(id(piece) in wrong for piece in line)]
    size, over = math.prod(subject.counts.axes.size(axis) for axis in chosen), " and ".join(chosen)
    sums = [Piece(line[0].rank, line[0].start, np.sum([p.value for p in line], axis=0)) for line in lines]
    error = max((difference(piece.value, piece.of(subject.due))[0] for piece in subject.wrong), default=0.0)
    if all(subject.matches(piece.value, piece.of(subject.due), error) for piece in sums):
        return f"the sum over {over} is missing: the copies add up to the reference"
    weights = weights_by_rank(subject, sums, most_error=error)
    if weights is None:
        return None
    first = next(iter(weights.values()))
    if all((found == first.flat[0]).all() for found in weights.values()):
        factor = float(first.flat[0])
        if close(factor, size):
            return f"the mean over {over} is missing: the copies' mean is the reference"
        why = factor_cause(factor, subject.counts) or NOTHING_FITS
        return f"the sum over {over} is missing: the copies add up to {number_words(factor)} × the reference ({why})"
    rest = weights_diagnosis(weights, [piece.rank for piece in sums], subject.counts)
    return f"the sum over {over} is missing, and in the copies' sum {rest.seen}: {rest.cause}"


def _confined(subject: Subject) -> Diagnosis | None:
    """A multiple of the reference, or nothing, in a part of the tensor; right elsewhere."""
    mask = wrong_mask(subject)
    where = box_words(mask)
    if where == "everywhere" or int(mask.sum()) < SPARE:
        return None
    inside = [mask[piece.box()] for piece in subject.wrong]
    value_n = np.concatenate([piece.value[at] for piece, at in zip(subject.wrong, inside, strict=True)])
    due_n = np.concatenate([piece.of(subject.due)[at] for piece, at in zip(subject.wrong, inside, strict=True)])
    place = f"at {where}, {place_words(subject.wrong_ranks, subject.speaking, subject.counts.axes)}"
    if not value_n.any():
        return Diagnosis(Kind.ZERO, f"zero {place}", "no gradient reached this part of the parameter")
    factor = scale_factor(Puzzle(value_n, due_n[None, None], subject.counts, int(mask.sum())))
    return None if factor is None else scaled(factor, place, subject.counts)
