"""One wrong tensor under examination, and the causes that any tensor can have.

Gradients and weights share these: pieces that don't make up the tensor, numbers that aren't finite, the right
numbers in a wrong place, copies that differ; and, when nothing is recognised, an honest description of where it
is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshwright.prove.compare.result import Diagnosis, Kind
from meshwright.prove.compare.tensor_shards import (
    Array,
    Assembly,
    Gap,
    Piece,
    coordinates,
    difference,
    largest,
    measure,
)
from meshwright.prove.diagnose.factors import Counts
from meshwright.prove.diagnose.fit_contributions import PROGRESS, RESIDUAL
from meshwright.prove.diagnose.phrases import box_words, place_words, rank_words

SILENT = 1e-14
"""Below this share of the tensor's scale a piece says nothing about its rank."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A tensor of the layout that differs from the reference's."""

    assembly: Assembly
    due: Array
    scale: float
    tolerance: float
    counts: Counts
    parts: Array | None = None
    """[share, micro-batch, *shape]: the parts of `due`, of a gradient."""

    @cached_property
    def wrong(self) -> tuple[Piece, ...]:
        """Pieces that are out of tolerance."""
        limit = self.tolerance * self.scale
        return tuple(p for p in self.assembly.pieces if difference(p.value, p.of(self.due))[0] > limit)

    @cached_property
    def wrong_ranks(self) -> list[int]:
        return sorted({piece.rank for piece in self.wrong})

    @cached_property
    def speaking(self) -> list[int]:
        """Ranks whose piece can be told right from wrong: not those whose part of the reference is all zero."""
        loud = {p.rank for p in self.assembly.pieces if largest(p.of(self.due)) > SILENT * self.scale}
        return sorted(loud | set(self.wrong_ranks))

    @cached_property
    def wide_gaps(self) -> list[Gap]:
        """Copies that differ by more than the tolerance."""
        return [gap for gap in self.assembly.gaps if gap.largest > self.tolerance * self.scale]

    def place(self) -> str:
        """`on every rank`, `only on rank 3`."""
        return place_words(self.wrong_ranks, self.speaking, self.counts.axes)

    def matches(self, value: Array, target: Array, error: float) -> bool:
        """Whether `value` is `target` but for rounding, where the deviation to be explained is `error`."""
        left = difference(value, target)[0]
        size = max(largest(value), largest(target))
        return left <= max(RESIDUAL, self.tolerance) * size and left <= PROGRESS * error


def unsound(subject: Subject) -> Diagnosis | None:
    """The pieces do not make up the tensor."""
    if not np.isfinite(subject.due).all():
        return Diagnosis(Kind.EVIDENCE, "the reference is not finite", "the reference is at fault, not the layout")
    faults = subject.assembly.faults
    if not subject.assembly.pieces and not faults:
        faults = ("no rank holds any of it",)
    return Diagnosis(Kind.EVIDENCE, "the pieces do not make up the tensor", "; ".join(faults)) if faults else None


def non_finite(subject: Subject) -> Diagnosis | None:
    """NaN or infinity."""
    bad = [piece for piece in subject.assembly.pieces if not np.isfinite(piece.value).all()]
    if not bad:
        return None
    nans = sum(int(np.isnan(piece.value).sum()) for piece in bad)
    infs = sum(int(np.isinf(piece.value).sum()) for piece in bad)
    place = place_words({piece.rank for piece in bad}, subject.speaking, subject.counts.axes)
    index = difference(bad[0].value, bad[0].of(subject.due))[1]
    full = [a + i for a, i in zip(bad[0].start, index, strict=True)]
    detail = f"{nans} NaN and {infs} infinite entries, the first at {full} on rank {bad[0].rank}"
    return Diagnosis(Kind.NON_FINITE, f"not finite {place}", "NaN or infinity entered the computation", detail)


def moved(subject: Subject, others: Mapping[str, Array]) -> Diagnosis | None:
    """The right numbers in a wrong place: another rank's piece, rows shifted, a transpose, another tensor."""
    return _exchanged(subject) or _rearranged(subject, others)


def _exchanged(subject: Subject) -> Diagnosis | None:
    boxes = {(piece.start, piece.stop): piece for piece in subject.assembly.pieces}
    holds: dict[int, int] = {}
    for piece in subject.wrong:
        own = piece.of(subject.due)
        error = difference(piece.value, own)[0]
        for other in boxes.values():
            target = other.of(subject.due)
            if target.shape == own.shape and subject.matches(piece.value, target, error):
                holds[piece.rank] = _nearest(subject, piece.rank, other)
                break
        else:
            return None
    if not holds:
        return None
    pairs = sorted({tuple(sorted((a, b))) for a, b in holds.items() if holds.get(b) == a})
    if pairs and len(pairs) * 2 == len(holds):
        told = [f"ranks {a} and {b} hold each other's piece" for a, b in pairs]
        cause = "pieces are exchanged between ranks"
    else:
        told = [f"rank {a} holds rank {b}'s piece" for a, b in sorted(holds.items())]
        cause = "pieces went to the wrong ranks"
    more = [f"{len(told) - 4} more"] if len(told) > 4 else []
    return Diagnosis(Kind.MOVED, ", ".join(told[:4] + more), cause)


def _nearest(subject: Subject, rank: int, other: Piece) -> int:
    """Of the ranks that hold the piece `other`, the one that differs from `rank` along the fewest axes."""
    axes, home = subject.counts.axes, coordinates(subject.counts.axes)[rank]
    same = [p.rank for p in subject.assembly.pieces if (p.start, p.stop) == (other.start, other.stop)]
    return min(same, key=lambda r: sum(home[axis] != at for axis, at in coordinates(axes)[r].items()))


def _rearranged(subject: Subject, others: Mapping[str, Array]) -> Diagnosis | None:
    words = set()
    for copy in subject.assembly.copies():
        error = difference(copy.value, subject.due)[0]
        if error <= subject.tolerance * subject.scale:
            continue
        words.add(_rearrangement(subject, copy.value, error, others))
    if len(words) != 1 or None in words:
        return None
    return Diagnosis(Kind.MOVED, f"{words.pop()} {subject.place()}", "the right numbers in a wrong place")


def _rearrangement(subject: Subject, value: Array, error: float, others: Mapping[str, Array]) -> str | None:
    due = subject.due
    if due.ndim == 2 and due.shape[0] == due.shape[1] and subject.matches(value, due.T, error):
        return "the transpose of the reference"
    for dim, size in enumerate(due.shape):
        fronts = np.moveaxis(due, dim, 0).reshape(size, -1)
        first = np.moveaxis(value, dim, 0).reshape(size, -1)[0]
        near = np.abs(fronts - first).max(axis=1) <= PROGRESS * error
        for k in np.flatnonzero(near):
            if k > 0 and subject.matches(value, np.roll(due, -int(k), axis=dim), error):
                shift = int(k) if 2 * k <= size else int(k) - size
                return f"the reference shifted by {-shift} along dim {dim}"
    for name, other in others.items():
        same = other is not due and other.shape == due.shape and name != subject.assembly.name
        if same and subject.matches(value, other, error):
            return f"what {name} should hold"
    return None


def copies_differ(subject: Subject) -> Diagnosis | None:
    """Ranks that should hold equal copies do not, and no sum explains it."""
    if not subject.wide_gaps:
        return None
    gap = subject.wide_gaps[0]
    seen = f"replicas differ between {rank_words(gap.ranks)} along {gap.axis}"
    right = sorted(set(subject.assembly.ranks()) - set(subject.wrong_ranks))
    if right:
        one = len(subject.wrong_ranks) == 1
        cause = f"only {rank_words(subject.wrong_ranks)} differ{'s' if one else ''} from the reference"
    else:
        cause = "no rank agrees with the reference, and neither does the copies' sum or mean"
    return Diagnosis(
        Kind.COPIES_DIFFER, seen, cause, f"by up to {gap.largest:.2g} at {list(gap.index)}; {extent(subject)}"
    )


def unrecognised(subject: Subject) -> Diagnosis:
    """Where it is wrong, when there is no telling why."""
    one_of_many = len(subject.wrong_ranks) == 1 and len(subject.speaking) > 1
    where = f"only {rank_words(subject.wrong_ranks)}'s piece differs" if one_of_many else f"wrong {subject.place()}"
    return Diagnosis(Kind.UNRECOGNISED, "not recognised", where, extent(subject))


def extent(subject: Subject) -> str:
    """How large the error is, where it is largest, and the box it is confined to."""
    error = measure(subject.assembly, subject.due, subject.scale)
    text = (
        f"relative error {error.relative:.1e}, largest at {list(error.index)} on rank {error.rank}: "
        f"{error.found:.6g} where {error.due:.6g} was due"
    )
    box = box_words(wrong_mask(subject))
    return text if box == "everywhere" else f"{text}; wrong at {box} only"


def wrong_mask(subject: Subject) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Elements of the full tensor that are out of tolerance on any rank."""
    mask = np.zeros(subject.due.shape, dtype=np.bool_)
    for piece in subject.wrong:
        with np.errstate(invalid="ignore"):
            bad = ~(np.abs(piece.value - piece.of(subject.due)) <= subject.tolerance * subject.scale)
        mask[piece.box()] |= bad
    return mask
