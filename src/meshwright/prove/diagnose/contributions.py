"""Turn fitted weights into a diagnosis: `the contribution of data-parallel rank 1 is missing`.

`fit_contributions` computes how many times a local tensor contains the gradient contribution of each micro-batch on
each data-parallel rank; in a correct tensor, all counts are 1. Data-parallel ranks and micro-batches are 0-based.
"""

from __future__ import annotations

import numpy as np

from meshwright.prove.compare.result import Diagnosis, FaultKind
from meshwright.prove.compare.tensor_shards import Array
from meshwright.prove.diagnose.factors import NOTHING_FITS, LayoutCounts, close, factor_cause
from meshwright.prove.diagnose.fit_contributions import local_masks
from meshwright.prove.diagnose.phrases import EVERYWHERE, index_words, number_words, rank_words, scope_words
from meshwright.units import join_words

MAX_LISTED = 4
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
    return Diagnosis(FaultKind.SCALED, symptom, cause, factor=factor)


def uniform_words(weights: Array, counts: LayoutCounts) -> SymptomAndCause:
    """Describe weights shared by all wrong ranks."""
    unit = _unit(weights)
    base = weights / unit
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

    The factor is 1 for [2, 0, 1] and [3, 0, 0]: the total is correct, but some contributions replace others.
    """
    values, nums = np.unique(weights[weights != 0], return_counts=True)
    is_whole = bool((weights >= 0).all() and (weights == np.round(weights)).all())
    if is_whole and (len(values) != 1 or values[0] * nums[0] == weights.size):
        return 1.0
    return float(values[nums.argmax()])


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
    return _weight_list(base[:, None], counts)


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
