"""Which counts of a layout explain a factor: 2.000 is dp_shard, 0.125 is the micro-batches times tp, 1.7 is nothing.

A number that is wrong by a whole factor almost always was summed over ranks or micro-batches where a mean was due,
or the other way round. Two axes of one size can't be told apart by the factor alone, so all candidates are named.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from meshwright.mesh.axes import Axes
from meshwright.prove.diagnose.phrases import join_words

CLOSE = 1e-9
"""Relative distance within which a measured factor is a count."""
NOTHING_FITS = "a factor that no axis, micro-batch count or batch size explains"


@dataclass(frozen=True)
class Term:
    """A number of things that a sum can run over."""

    label: str
    size: int
    rarity: int
    """How far-fetched it is: causes with the smallest are named, others are not."""


@dataclass(frozen=True)
class Counts:
    """All the counts that can slip into a number."""

    axes: Axes
    num_microbatches: int
    num_samples: int
    """Of the whole batch."""

    def terms(self) -> list[Term]:
        """The things a sum can run over, likely ones first."""
        used, found = self.axes.used(), []
        data = tuple(axis for axis in ("dp_replicate", "dp_shard") if axis in used)
        for num in range(1, len(used) + 1):
            for chosen in itertools.combinations(used, num):
                size = math.prod(used[axis] for axis in chosen)
                rarity = 1 if num == 1 or chosen == data else num
                found.append(Term(f"{' × '.join(chosen)} ({size} ranks)", size, rarity))
        micro = self.num_microbatches
        if micro > 1:
            ranks = list(found)
            found.append(Term(f"the {micro} micro-batches", micro, 1))
            found += [Term(f"{t.label} and the {micro} micro-batches", t.size * micro, t.rarity + 1) for t in ranks]
        shares = self.axes.data_parallel()
        for size, of in (
            (self.num_samples, "the batch"),
            (self.num_samples // shares, "a rank's share"),
            (self.num_samples // (shares * micro), "a micro-batch"),
        ):
            if size > 1 and all(size != term.size for term in found):
                found.append(Term(f"the {size} samples of {of}", size, 3))
        return sorted(found, key=lambda term: term.rarity)

    def factors(self) -> list[float]:
        """Factors worth trying in a fit: every count and its inverse, and a plain 2."""
        sizes = {1, 2} | {term.size for term in self.terms() if term.rarity <= 2}
        return sorted({*map(float, sizes), *(1.0 / size for size in sizes)}, key=lambda c: abs(math.log(c)))


def factor_cause(factor: float, counts: Counts, *, only_axis: str | None = None) -> str:
    """What multiplies by `factor`, in words; empty when no count does.

    `only_axis`: it is known from elsewhere that this axis is to blame.
    """
    if factor < 0:
        rest = "" if close(factor, -1.0) else factor_cause(-factor, counts)
        return "the sign is flipped" + (f", and {rest}" if rest else "")
    terms = counts.terms()
    if only_axis is not None:
        terms = [term for term in terms if term.label.startswith(f"{only_axis} (")]
    summed = _rarest_last([term for term in terms if close(factor, term.size)])
    if summed:
        return f"summed over {_either(summed)} where a mean was due"
    averaged = _rarest_last([term for term in terms if close(factor, 1.0 / term.size)])
    if averaged:
        return f"averaged over {_either(averaged)} where a sum was due"
    return _two_terms(factor, [term for term in terms if term.rarity == 1])


def close(value: float, target: float) -> bool:
    """Equal but for rounding."""
    return abs(value - target) <= CLOSE * abs(target)


def _rarest_last(terms: list[Term]) -> list[Term]:
    return [term for term in terms if term.rarity == terms[0].rarity]


def _either(terms: list[Term]) -> str:
    return join_words([terms[0].label, *(f"over {term.label}" for term in terms[1:])], last="or")


def _two_terms(factor: float, terms: list[Term]) -> str:
    for up, down in itertools.permutations(terms, 2):
        if up.size != down.size and close(factor, up.size / down.size):
            return f"summed over {up.label} where a mean was due, and averaged over {down.label} where a sum was due"
    return ""
