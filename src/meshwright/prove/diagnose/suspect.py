"""A wrong tensor, and diagnoses common to gradients and weights.

These cover incomplete or overlapping shards, non-finite values, misplaced values and differing replicas. If none
applies, the location and size of the error are reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshwright.prove.compare.result import Diagnosis, FaultKind
from meshwright.prove.compare.tensor_shards import (
    Array,
    AssembledTensor,
    LocalShard,
    ReplicaMismatch,
    coordinates,
    max_difference,
    max_magnitude,
    measure_deviation,
)
from meshwright.prove.diagnose.factors import LayoutCounts
from meshwright.prove.diagnose.fit_contributions import PROGRESS, RESIDUAL
from meshwright.prove.diagnose.phrases import box_words, rank_words, scope_words

UNKNOWN = (FaultKind.UNRECOGNISED, FaultKind.REPLICAS_DIFFER)
"""Kinds of diagnoses that name no cause."""
NEGLIGIBLE = 1e-14
"""Fraction of the scale below which a reference shard is too small to tell whether its rank is correct."""


@dataclass(frozen=True, eq=False)
class SuspectTensor:
    """Tensor of the layout together with its reference."""

    assembly: AssembledTensor
    expected: Array
    scale: float
    tolerance: float
    counts: LayoutCounts
    contributions: Array | None = None
    """Contributions to a gradient, which sum to `expected`: [data-parallel rank, micro-batch, *shape]."""

    @cached_property
    def wrong_shards(self) -> tuple[LocalShard, ...]:
        """Shards that exceed the tolerance."""
        limit = self.tolerance * self.scale
        return tuple(p for p in self.assembly.shards if max_difference(p.value, p.slice_of(self.expected))[0] > limit)

    @cached_property
    def wrong_ranks(self) -> list[int]:
        return sorted({shard.rank for shard in self.wrong_shards})

    @cached_property
    def informative_ranks(self) -> list[int]:
        """Ranks whose shard can be checked: wrong ones and those with a non-negligible reference shard."""
        nonzero = {
            p.rank for p in self.assembly.shards if max_magnitude(p.slice_of(self.expected)) > NEGLIGIBLE * self.scale
        }
        return sorted(nonzero | set(self.wrong_ranks))

    @cached_property
    def large_mismatches(self) -> list[ReplicaMismatch]:
        """Replica mismatches that exceed the tolerance."""
        return [mismatch for mismatch in self.assembly.mismatches if mismatch.largest > self.tolerance * self.scale]

    def scope_text(self) -> str:
        """Format the wrong ranks: `on every rank`, `only on rank 3`."""
        return scope_words(self.wrong_ranks, self.informative_ranks, self.counts.axes)

    def matches(self, value: Array, target: Array, error: float) -> bool:
        """Return whether `value` equals `target` up to rounding, relative to the deviation `error` to explain."""
        left = max_difference(value, target)[0]
        size = max(max_magnitude(value), max_magnitude(target))
        return left <= max(RESIDUAL, self.tolerance) * size and left <= max(PROGRESS, self.counts.rounding) * error


def incomplete(suspect: SuspectTensor) -> Diagnosis | None:
    """Diagnose shards that do not form the full tensor."""
    if not np.isfinite(suspect.expected).all():
        return Diagnosis(FaultKind.EVIDENCE, "the reference is not finite", "the reference is at fault, not the layout")
    faults = suspect.assembly.faults
    if not suspect.assembly.shards and not faults:
        faults = ("no rank holds a shard",)
    return Diagnosis(FaultKind.EVIDENCE, "the shards do not make up the tensor", "; ".join(faults)) if faults else None


def non_finite(suspect: SuspectTensor) -> Diagnosis | None:
    """Diagnose NaN or infinite values."""
    bad = [shard for shard in suspect.assembly.shards if not np.isfinite(shard.value).all()]
    if not bad:
        return None
    nans = sum(int(np.isnan(shard.value).sum()) for shard in bad)
    infs = sum(int(np.isinf(shard.value).sum()) for shard in bad)
    scope = scope_words({shard.rank for shard in bad}, suspect.informative_ranks, suspect.counts.axes)
    index = max_difference(bad[0].value, bad[0].slice_of(suspect.expected))[1]
    full = [a + i for a, i in zip(bad[0].start, index, strict=True)]
    detail = f"{nans} NaN and {infs} infinite entries, the first at {full} on rank {bad[0].rank}"
    return Diagnosis(FaultKind.NON_FINITE, f"not finite {scope}", "NaN or infinity entered the computation", detail)


def misplaced(suspect: SuspectTensor, references: Mapping[str, Array]) -> Diagnosis | None:
    """Diagnose correct values at the wrong position: another shard, shifted rows, a transpose or another tensor."""
    return _swapped_shards(suspect) or _rearranged(suspect, references)


def _swapped_shards(suspect: SuspectTensor) -> Diagnosis | None:
    boxes = {(shard.start, shard.stop): shard for shard in suspect.assembly.shards}
    holds: dict[int, int] = {}
    for shard in suspect.wrong_shards:
        own = shard.slice_of(suspect.expected)
        error = max_difference(shard.value, own)[0]
        for other in boxes.values():
            target = other.slice_of(suspect.expected)
            if target.shape == own.shape and suspect.matches(shard.value, target, error):
                holds[shard.rank] = _nearest(suspect, shard.rank, other)
                break
        else:
            return None
    if not holds:
        return None
    pairs = sorted({tuple(sorted((a, b))) for a, b in holds.items() if holds.get(b) == a})
    if pairs and len(pairs) * 2 == len(holds):
        swaps = [f"ranks {a} and {b} hold each other's shard" for a, b in pairs]
        cause = "shards are swapped between ranks"
    else:
        swaps = [f"rank {a} holds rank {b}'s shard" for a, b in sorted(holds.items())]
        cause = "shards were sent to the wrong ranks"
    more = [f"{len(swaps) - 4} more"] if len(swaps) > 4 else []
    return Diagnosis(FaultKind.MISPLACED, ", ".join(swaps[:4] + more), cause)


def _nearest(suspect: SuspectTensor, rank: int, other: LocalShard) -> int:
    """Return the rank closest to `rank` (fewest differing axes) that holds shard `other`."""
    axes, home = suspect.counts.axes, coordinates(suspect.counts.axes)[rank]
    same = [p.rank for p in suspect.assembly.shards if (p.start, p.stop) == (other.start, other.stop)]
    return min(same, key=lambda r: sum(home[axis] != at for axis, at in coordinates(axes)[r].items()))


def _rearranged(suspect: SuspectTensor, references: Mapping[str, Array]) -> Diagnosis | None:
    words = set()
    for copy in suspect.assembly.replicas():
        error = max_difference(copy.value, suspect.expected)[0]
        if error <= suspect.tolerance * suspect.scale:
            continue
        words.add(_rearrangement(suspect, copy.value, error, references))
    if len(words) != 1 or None in words:
        return None
    return Diagnosis(FaultKind.MISPLACED, f"{words.pop()} {suspect.scope_text()}", "correct values in the wrong place")


def _rearrangement(suspect: SuspectTensor, value: Array, error: float, references: Mapping[str, Array]) -> str | None:
    expected = suspect.expected
    if expected.ndim == 2 and expected.shape[0] == expected.shape[1] and suspect.matches(value, expected.T, error):
        return "the transpose of the reference"
    for dim, size in enumerate(expected.shape):
        fronts = np.moveaxis(expected, dim, 0).reshape(size, -1)
        first = np.moveaxis(value, dim, 0).reshape(size, -1)[0]
        near = np.abs(fronts - first).max(axis=1) <= PROGRESS * error
        for k in np.flatnonzero(near):
            if k > 0 and suspect.matches(value, np.roll(expected, -int(k), axis=dim), error):
                shift = int(k) if 2 * k <= size else int(k) - size
                return f"the reference shifted by {-shift} along dim {dim}"
    for name, other in references.items():
        same = other is not expected and other.shape == expected.shape and name != suspect.assembly.name
        if same and suspect.matches(value, other, error):
            return f"the reference of {name}"
    return None


def replicas_differ(suspect: SuspectTensor) -> Diagnosis | None:
    """Diagnose replicas that differ for a reason other than a missing reduction."""
    if not suspect.large_mismatches:
        return None
    mismatch = suspect.large_mismatches[0]
    symptom = f"replicas differ between {rank_words(mismatch.ranks)} along {mismatch.axis}"
    right = sorted(set(suspect.assembly.ranks()) - set(suspect.wrong_ranks))
    if right:
        one = len(suspect.wrong_ranks) == 1
        cause = f"only {rank_words(suspect.wrong_ranks)} differ{'s' if one else ''} from the reference"
    else:
        cause = "neither any rank nor the sum or mean of the replicas agrees with the reference"
    detail = f"by up to {mismatch.largest:.2g} at {list(mismatch.index)}; {describe_error(suspect)}"
    return Diagnosis(FaultKind.REPLICAS_DIFFER, symptom, cause, detail)


def unrecognised(suspect: SuspectTensor) -> Diagnosis:
    """Report the location of an error with an unknown cause."""
    one_of_many = len(suspect.wrong_ranks) == 1 and len(suspect.informative_ranks) > 1
    where = (
        f"only {rank_words(suspect.wrong_ranks)}'s shard differs" if one_of_many else f"wrong {suspect.scope_text()}"
    )
    return Diagnosis(FaultKind.UNRECOGNISED, "not recognised", where, describe_error(suspect))


def describe_error(suspect: SuspectTensor) -> str:
    """Describe the size of the error, the location of its maximum, and the affected region."""
    error = measure_deviation(suspect.assembly, suspect.expected, suspect.scale)
    text = (
        f"relative error {error.relative:.1e}, largest at {list(error.index)} on rank {error.rank}: "
        f"{error.observed:.6g}, expected {error.expected:.6g}"
    )
    box = box_words(wrong_mask(suspect))
    return text if box == "everywhere" else f"{text}; wrong at {box} only"


def wrong_mask(suspect: SuspectTensor) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Return a mask of the elements of the full tensor that exceed the tolerance on any rank."""
    mask = np.zeros(suspect.expected.shape, dtype=np.bool_)
    for shard in suspect.wrong_shards:
        with np.errstate(invalid="ignore"):
            bad = ~(np.abs(shard.value - shard.slice_of(suspect.expected)) <= suspect.tolerance * suspect.scale)
        mask[shard.slices()] |= bad
    return mask
