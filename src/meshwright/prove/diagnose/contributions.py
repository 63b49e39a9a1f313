"""Says what a combination of the batch's cells means: `the parts of data-parallel share 1 are missing`.

Weights come from `fit`: how often each (data-parallel share, micro-batch) cell is in what a rank holds, 1
everywhere when all is well. Shares and micro-batches are counted from 0, as ranks are.
"""

from __future__ import annotations

import numpy as np

from meshwright.prove.compare.result import Diagnosis, Kind
from meshwright.prove.compare.tensor_shards import Array
from meshwright.prove.diagnose.factors import NOTHING_FITS, Counts, close, factor_cause
from meshwright.prove.diagnose.fit_contributions import own_masks
from meshwright.prove.diagnose.phrases import EVERYWHERE, index_words, join_words, number_words, place_words, rank_words

MAX_CELLS = 4
Words = tuple[str, str]
"""What is seen, and its cause."""


def weights_diagnosis(weights: dict[int, Array], speaking: list[int], counts: Counts) -> Diagnosis:
    """The finding for wrong ranks that hold the parts with `weights`; `speaking` ranks hold anything at all."""
    place = place_words(weights, speaking, counts.axes)
    only = "" if place == EVERYWHERE else f", {place}"
    first = next(iter(weights.values()))
    uniform = all(np.array_equal(first, other) for other in weights.values())
    if uniform and (first == first.flat[0]).all():
        return scaled(float(first.flat[0]), place, counts)
    # Ranks of one share alone are no case of "share 0 everywhere": it is their own.
    one_share = len({counts.axes.data_index(rank) for rank in weights}) == 1
    own = _own_words(weights, counts) if one_share or not uniform else None
    if own is not None:
        return Diagnosis(Kind.SUM_MISSING, own[0] + only, own[1])
    if uniform:
        seen, cause = uniform_words(first, counts)
        numbers, is_lost = _odd_microbatches(first)
        return Diagnosis(Kind.PARTS, seen + only, cause, microbatches=numbers, is_lost=is_lost)
    return _each_its_own(weights, only, counts)


def scaled(factor: float, place: str, counts: Counts, *, only_axis: str | None = None) -> Diagnosis:
    """The finding for a plain multiple of the reference."""
    seen = f"{number_words(factor)} × the reference {place}"
    cause = factor_cause(factor, counts, only_axis=only_axis) or NOTHING_FITS
    return Diagnosis(Kind.SCALED, seen, cause, factor=factor)


def uniform_words(weights: Array, counts: Counts) -> Words:
    """Words for one combination, held by all."""
    unit = _unit(weights)
    base = weights / unit
    if _constant_along(base, 1):
        words = _share_words(base[:, 0], counts)
    elif _constant_along(base, 0):
        words = _micro_words(base[0])
    else:
        words = _cell_words(base, counts)
    seen, cause = words
    if unit != 1.0:
        seen += f", and all of it {number_words(unit)} ×"
        cause += f"; besides, {factor_cause(unit, counts) or NOTHING_FITS}"
    return seen, cause


def _unit(weights: Array) -> float:
    """The factor that stands before whole counts: 0.5 for [0.5, 0, 0.5], 3 for [3, 3, 0].

    1 for [2, 0, 1], and for [3, 0, 0]: that are as many parts as were due, so some stand in the place of others.
    """
    values, nums = np.unique(weights[weights != 0], return_counts=True)
    whole = bool((weights >= 0).all() and (weights == np.round(weights)).all())
    if whole and (len(values) != 1 or values[0] * nums[0] == weights.size):
        return 1.0
    return float(values[nums.argmax()])


def _constant_along(base: Array, dim: int) -> bool:
    return base.shape[1 - dim] > 1 and bool((base == base.take([0], axis=dim)).all())


def _share_words(base: Array, counts: Counts) -> Words:
    """`base` has one weight a share."""
    lost, extra = _lost_and_extra(base)
    if lost and extra:
        (a, b) = ("shares " if len(lost) > 1 else "share ") + index_words(lost), index_words(extra)
        seen = f"data-parallel {a} missing and share {b} counted {_times(base[extra[0]])}"
        return seen, f"{_ranks_of(lost, counts)} read another rank's samples: those of share {b}"
    if lost:
        seen = f"the parts of data-parallel {_share_list(lost)} are missing"
        left = [k for k in range(len(base)) if base[k] != 0]
        return seen, _missing_cause(left, lost, counts)
    if extra and len({float(base[k]) for k in extra}) == 1:
        seen = f"data-parallel {_share_list(extra)} counted {_times(base[extra[0]])}"
        return seen, f"the parts of {_ranks_of(extra, counts)} enter the sum more than once"
    return _weight_list(base[:, None], counts)


def _odd_microbatches(weights: Array) -> tuple[tuple[int, ...], bool]:
    """Micro-batches missing on every share, or else counted more than once; and whether it is the former."""
    if weights.shape[1] == 1 or (weights != weights[:1]).any():
        return (), False
    lost, extra = _lost_and_extra(weights[0])
    return ((), False) if lost and extra else (tuple(lost or extra), bool(lost))


def _missing_cause(left: list[int], lost: list[int], counts: Counts) -> str:
    for rank in range(counts.axes.num_ranks()):
        for mask, missing in own_masks(counts, rank):
            if np.flatnonzero(mask[:, 0]).tolist() == left:
                only = f"only the parts of {_share_list(left)} ({_ranks_of(left, counts)}) are there"
                return f"the sum over {' and '.join(missing)} is missing: {only}"
    return f"what {_ranks_of(lost, counts)} computed does not enter the sum"


def _micro_words(base: Array) -> Words:
    """`base` has one weight a micro-batch."""
    lost, extra = _lost_and_extra(base)
    last = len(base) - 1
    if lost and extra and len(lost) == len(extra) == 1:
        seen = f"micro-batch {lost[0]} is lost and micro-batch {extra[0]} counted {_times(base[extra[0]])}"
        return seen, "one micro-batch is worked through in another's place"
    if lost == list(range(last)):
        times = "" if base[last] == 1 else f", counted {_times(base[last])}"
        return (
            f"only the last micro-batch ({last}) is there{times}",
            "each micro-batch's gradient overwrites the one before: accumulation is missing",
        )
    if lost:
        seen = (
            f"micro-batch {index_words(lost)} is lost"
            if len(lost) == 1
            else (f"micro-batches {index_words(lost)} are lost")
        )
        return seen, "gradient accumulation leaves it out" if len(lost) == 1 else "accumulation leaves them out"
    if extra and len({float(base[k]) for k in extra}) == 1:
        seen = f"micro-batch {index_words(extra)} counted {_times(base[extra[0]])}"
        return seen, "gradient accumulation adds it more than once"
    return "micro-batches weigh " + ", ".join(number_words(float(w)) for w in base), "they should weigh the same"


def _cell_words(base: Array, counts: Counts) -> Words:
    """Neither whole shares nor whole micro-batches."""
    odd = [d for d in range(len(base)) if (base[d] != 1).any()]
    if len(odd) == 1:
        seen, cause = _micro_words(base[odd[0]])
        return f"of data-parallel share {odd[0]} ({_ranks_of(odd, counts)}) {seen}", cause
    if len(odd) < len(base) or not all(np.array_equal(base[d], base[odd[0]]) for d in odd):
        lost, extra = np.argwhere(base == 0), np.argwhere(base == 2)
        if len(lost) == len(extra) == 1 and (base != 1).sum() == 2:
            a, b = (f"share {d}'s micro-batch {m}" for d, m in (lost[0], extra[0]))
            return f"{a} is missing and {b} counted twice", f"{b} stands in the place of {a}"
    return _weight_list(base, counts)


def _weight_list(base: Array, counts: Counts) -> Words:
    odd = np.argwhere(base != 1)
    listed = [f"share {d} micro-batch {m} × {number_words(float(base[d, m]))}" for d, m in odd[:MAX_CELLS]]
    if len(odd) > MAX_CELLS:
        listed.append(f"{len(odd) - MAX_CELLS} more")
    seen = "the reference's parts with other weights, " + ", ".join(listed)
    return seen, "parts enter the sum the wrong number of times"


def _own_words(weights: dict[int, Array], counts: Counts) -> Words | None:
    """Words for ranks that each hold the parts of their own share or of their own group of shares."""
    num_options = len(own_masks(counts, 0))
    if any(found.shape != (counts.axes.data_parallel(), counts.num_microbatches) for found in weights.values()):
        return None
    for option in range(num_options):
        missing, factors, columns = own_masks(counts, 0)[option][1], set(), set()
        for rank, found in weights.items():
            mask = own_masks(counts, rank)[option][0]
            inside = found[mask[:, 0] > 0]
            if (found[mask == 0] != 0).any() or (inside != inside[0]).any():
                break
            factors.add(_unit(inside))
            columns.add(tuple((inside[0] / _unit(inside)).tolist()))
        else:
            if len(factors) == len(columns) == 1:
                return _missing_sum_words(missing, factors.pop(), np.array(columns.pop()), counts)
    return None


def _missing_sum_words(missing: tuple[str, ...], factor: float, column: Array, counts: Counts) -> Words:
    over = " and ".join(missing)
    size = 1
    for axis in missing:
        size *= counts.axes.size(axis)
    owner = (
        "its own share's part"
        if set(missing) >= {a for a in counts.axes.used() if a.startswith("dp_")}
        else (f"the parts of its own {over} group")
    )
    what, times = "sum", ""
    # _unit reads [2, 2] of whole numbers as counts of two, not as a factor; here the factor is meant.
    if (column == column[0]).all():
        factor, column = factor * float(column[0]), column / column[0]
    if close(factor, size):
        what, times = "mean", f"{number_words(factor)} × "
    elif factor != 1.0:
        times = f"{number_words(factor)} × "
    seen = f"each rank holds only {times}{owner}"
    cause = f"the {what} over {over} is missing"
    if times and what == "sum":
        cause += f", and {factor_cause(factor, counts) or NOTHING_FITS}"
    if (column != 1).any():
        cause += "; besides, " + ": ".join(_micro_words(column))
    return seen, cause


def _each_its_own(weights: dict[int, Array], only: str, counts: Counts) -> Diagnosis:
    groups: dict[bytes, list[int]] = {}
    for rank, found in weights.items():
        groups.setdefault(found.tobytes(), []).append(rank)
    told = []
    for ranks in list(groups.values())[:MAX_CELLS]:
        found = weights[ranks[0]]
        constant = bool((found == found.flat[0]).all())
        multiple = f"{number_words(float(found.flat[0]))} × the reference"
        told.append(f"{rank_words(ranks)}: {multiple if constant else uniform_words(found, counts)[0]}")
    seen = "different combinations of the reference's parts on different ranks" + only
    return Diagnosis(Kind.PARTS, seen, "; ".join(told))


def _lost_and_extra(base: Array) -> tuple[list[int], list[int]]:
    """Lines with weight 0 and with weight 2 or more; both empty when there are weights other than whole counts."""
    if (base < 0).any() or (base != np.round(base)).any():
        return [], []
    return np.flatnonzero(base == 0).tolist(), np.flatnonzero(base >= 2).tolist()


def _times(weight: float) -> str:
    return "twice" if weight == 2 else f"{weight:.0f} times"


def _share_list(shares: list[int]) -> str:
    return f"share {shares[0]}" if len(shares) == 1 else "shares " + join_words([str(s) for s in shares])


def _ranks_of(shares: list[int], counts: Counts) -> str:
    axes = counts.axes
    return rank_words(rank for rank in range(axes.num_ranks()) if axes.data_index(rank) in shares)
