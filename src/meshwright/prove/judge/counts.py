"""Match a wrong factor to the sizes of a layout: 2.000 may be dp_shard, 0.125 the micro-batches times tp.

A value off by an exact factor was almost always summed instead of averaged over ranks or micro-batches, or vice versa.
The factor alone cannot distinguish two axes of equal size, so all candidates are listed.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from meshwright.mesh.axes import Axes
from meshwright.units import join_words

CLOSE = 1e-9
"""Relative tolerance for matching a measured factor to a count."""
MAX_RARITY = 8
"""Highest rarity of any term."""
NOTHING_FITS = "a factor that no axis, micro-batch count or batch size explains"


@dataclass(frozen=True)
class ReductionTerm:
    """Ranks, micro-batches or samples that a reduction can run over."""

    label: str
    size: int
    rarity: int
    """Rarity of such a fault, 1 for the most common; only the most plausible matches are listed."""


@dataclass(frozen=True)
class LayoutCounts:
    """Sizes of the mesh and the batch, any of which can appear as a wrong factor."""

    axes: Axes
    num_microbatches: int
    num_samples: int
    """Number of samples in the global batch."""
    by_context: bool = False
    """Whether contributions are those of each context-parallel rank's tokens, not of whole samples."""
    rounding: float = 0.0
    """Relative rounding error of the compared values, if larger than that of float64."""

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Axes over which contributions are summed."""
        return ("dp_replicate", "dp_shard", "cp") if self.by_context else ("dp_replicate", "dp_shard")

    @property
    def num_parts(self) -> int:
        """Number of parts of the batch whose contributions are known, per micro-batch."""
        return math.prod(self.axes.size(axis) for axis in self.data_axes)

    def part(self, rank: int) -> int:
        """Return the part of the batch that a rank has."""
        index, position = 0, self.axes.coordinate(rank)
        for axis in self.data_axes:
            index = index * self.axes.size(axis) + position[axis]
        return index

    def part_words(self, part: int) -> str:
        """Format a part of the batch: `data-parallel rank 1`, `cp rank 0 of data-parallel rank 1`, `cp rank 0`."""
        if not self.by_context:
            return f"data-parallel rank {part}"
        data, context = divmod(part, self.axes.cp)
        of = f" of data-parallel rank {data}" if self.axes.data_parallel() > 1 else ""
        return f"cp rank {context}{of}"

    def terms(self) -> list[ReductionTerm]:
        """Return everything a reduction can run over, most plausible first."""
        used, terms = self.axes.used(), []
        data = tuple(axis for axis in ("dp_replicate", "dp_shard") if axis in used)
        for num in range(1, len(used) + 1):
            for chosen in itertools.combinations(used, num):
                size = math.prod(used[axis] for axis in chosen)
                rarity = 1 if num == 1 or chosen == data else num
                terms.append(ReductionTerm(f"{' × '.join(chosen)} ({size} ranks)", size, rarity))
        micro = self.num_microbatches
        if micro > 1:
            ranks = list(terms)
            terms.append(ReductionTerm(f"the {micro} micro-batches", micro, 1))
            terms += [
                ReductionTerm(f"{t.label} and the {micro} micro-batches", t.size * micro, t.rarity + 1) for t in ranks
            ]
        dp_size = self.axes.data_parallel()
        for size, of in (
            (self.num_samples, "the batch"),
            (self.num_samples // dp_size, "a data-parallel rank"),
            (self.num_samples // (dp_size * micro), "a micro-batch"),
        ):
            if size > 1 and all(size != term.size for term in terms):
                terms.append(ReductionTerm(f"the {size} samples of {of}", size, 3))
        return sorted(terms, key=lambda term: term.rarity)

    def factors(self) -> list[float]:
        """Return candidate factors for a fit: all sizes, their inverses, and 2."""
        sizes = {1, 2} | {term.size for term in self.terms() if term.rarity <= 2}
        return sorted({*map(float, sizes), *(1.0 / size for size in sizes)}, key=lambda c: abs(math.log(c)))


def factor_cause(
    factor: float, counts: LayoutCounts, *, only_axis: str | None = None, max_rarity: int = MAX_RARITY
) -> str:
    """Describe the likely cause of `factor`, or return an empty string if no size explains it.

    Args:
        only_axis: axis to restrict the candidates to.
        max_rarity: rarity to restrict the candidates to.
    """
    if factor < 0:
        rest = "" if close(factor, -1.0, counts.rounding) else factor_cause(-factor, counts)
        return "the sign is flipped" + (f", and {rest}" if rest else "")
    terms = [term for term in counts.terms() if term.rarity <= max_rarity]
    if only_axis is not None:
        terms = [term for term in terms if term.label.startswith(f"{only_axis} (")]
    summed = _most_plausible([term for term in terms if close(factor, term.size, counts.rounding)])
    if [term.label for term in summed] == [f"cp ({counts.axes.cp} ranks)"]:
        return f"summed over {summed[0].label} once more"
    if summed:
        return f"summed over {_either(summed)} instead of averaged"
    averaged = _most_plausible([term for term in terms if close(factor, 1.0 / term.size, counts.rounding)])
    if averaged:
        return f"averaged over {_either(averaged)} instead of summed"
    return _two_terms(factor, [term for term in terms if term.rarity == 1], counts.rounding)


def close(value: float, target: float, rounding: float = 0.0) -> bool:
    """Return whether the values are equal up to rounding, which is at least that of float64."""
    return abs(value - target) <= max(CLOSE, rounding) * abs(target)


def _most_plausible(terms: list[ReductionTerm]) -> list[ReductionTerm]:
    return [term for term in terms if term.rarity == terms[0].rarity]


def _either(terms: list[ReductionTerm]) -> str:
    return join_words([terms[0].label, *(f"over {term.label}" for term in terms[1:])], last="or")


def _two_terms(factor: float, terms: list[ReductionTerm], rounding: float) -> str:
    for up, down in itertools.permutations(terms, 2):
        if up.size != down.size and close(factor, up.size / down.size, rounding):
            return f"summed over {up.label} instead of averaged, and averaged over {down.label} instead of summed"
    return ""
