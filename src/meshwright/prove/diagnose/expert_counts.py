"""Diagnose wrong counts of experts' tokens, and a wrong balancing bias, after the first step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.prove.compare.result import Diagnosis, FaultKind
from meshwright.prove.compare.tensor_shards import Array
from meshwright.prove.diagnose.factors import CLOSE, NOTHING_FITS, LayoutCounts, close, factor_cause
from meshwright.prove.diagnose.gradients import weights_by_rank
from meshwright.prove.diagnose.phrases import number_words, rank_words
from meshwright.prove.diagnose.suspect import SuspectTensor
from meshwright.prove.placement import ExpertPlacement


def diagnose_counts(suspect: SuspectTensor, contributions: Array, experts: ExpertPlacement) -> Diagnosis | None:
    """Return the cause of wrong counts of experts' tokens after step 1, if recognised.

    Args:
        suspect: the counts.
        contributions: [data-parallel rank, micro-batch, expert]: counts of step 1, which sum to the expected ones.
        experts: placement of the experts.
    """
    suspect = replace(suspect, contributions=contributions)
    weights = weights_by_rank(suspect, suspect.wrong_shards)
    if weights is None:
        return None
    scope, first = suspect.scope_text(), next(iter(weights.values()))
    if all((each == first.flat[0]).all() for each in weights.values()):
        factor = float(first.flat[0])
        symptom = f"counts of experts' tokens are {number_words(factor)} × the reference {scope}"
        return Diagnosis(FaultKind.COUNTS, symptom, _recounted(factor, suspect.counts, experts), factor=factor)
    return Diagnosis(FaultKind.COUNTS, *_counted_words(weights, scope, suspect.counts))


def _recounted(factor: float, counts: LayoutCounts, experts: ExpertPlacement) -> str:
    is_double = factor == 2.0
    causes = ["recomputed forwards count their tokens again"] if experts.recomputes and is_double else []
    causes += [
        f"counts are summed once more over {term.label}"
        for term in counts.terms()
        if term.rarity == 1 and close(factor, term.size) and "ranks" in term.label
    ]
    causes += ["counts are added twice in a step"] if is_double else []
    return ", or ".join(causes) or factor_cause(factor, counts) or NOTHING_FITS


def _counted_words(weights: dict[int, Array], scope: str, counts: LayoutCounts) -> tuple[str, str]:
    axes, last = counts.axes, counts.num_microbatches - 1
    own_only = all(
        not np.delete(found, axes.data_index(rank), 0).any() and found[axes.data_index(rank)].any()
        for rank, found in weights.items()
    )
    found = next(iter(weights.values()))
    found_m = found[axes.data_index(next(iter(weights)))] if own_only else found.max(0)
    numbers: list[int] = [int(m) for m in np.flatnonzero(found_m)]
    symptoms, causes = [], []
    if own_only and axes.data_parallel() > 1:
        symptoms.append("each rank's own tokens")
        causes.append("counts are not summed over the data-parallel ranks")
    if numbers == [last] and last:
        symptoms.append(f"the last micro-batch ({last})")
        causes.append("each micro-batch's counts replace those of the one before it")
    elif len(numbers) <= last:
        symptoms.append(f"micro-batch {', '.join(str(m) for m in numbers)}")
        causes.append("counts of the other micro-batches are missing")
    lost = [d for d in range(len(found)) if not own_only and not found[d].any()]
    if lost:
        symptoms.append(f"all data-parallel ranks but {rank_words(lost)}")
        causes.append(f"counts of data-parallel {rank_words(lost)} are missing")
    if not symptoms:
        cause = "micro-batches are counted the wrong number of times"
        return f"counts of experts' tokens have wrong weights {scope}", cause
    return f"counts include only {' of '.join(reversed(symptoms))}, {scope}", "; ".join(causes)


def diagnose_bias(
    suspect: SuspectTensor, held_counts: dict[int, Array], contributions: Array, rate: float
) -> Diagnosis | None:
    """Return the cause of a wrong balancing bias after step 1, if recognised.

    Args:
        suspect: the bias.
        held_counts: the layout's counts of step 1, by rank.
        contributions: [data-parallel rank, micro-batch, expert]: right counts of step 1.
        rate: step by which the bias changes.
    """
    values, scope = [shard.value for shard in suspect.wrong_shards], suspect.scope_text()

    def is_change(change: Array) -> bool:
        return all(np.allclose(value, change, rtol=CLOSE, atol=CLOSE * rate) for value in values)

    def words(symptom: str, cause: str) -> Diagnosis:
        return Diagnosis(FaultKind.COUNTS, f"{symptom} {scope}", cause)

    due = balancing_step(contributions.sum((0, 1)), rate)
    axes, num_microbatches = suspect.counts.axes, contributions.shape[1]
    if all(
        shard.rank in held_counts and _is_step(shard.value, held_counts[shard.rank], rate)
        for shard in suspect.wrong_shards
    ):
        return Diagnosis(FaultKind.CONSEQUENCE, f"wrong {scope}", "follows from wrong counts of experts' tokens")
    if is_change(-due):
        return words("the bias changes in the opposite direction", "the sign is flipped: busy experts get more tokens")
    if is_change(0 * due):
        return words("the bias does not change", "the bias is not updated")
    by_microbatch = [balancing_step(contributions[:, m].sum(0), rate) for m in range(num_microbatches)]
    if num_microbatches > 1 and is_change(np.sum(by_microbatch, axis=0)):
        return words("the bias changes once per micro-batch", "the bias is updated from each micro-batch's counts")
    for factor in (2, 3, 4, num_microbatches, 2 * num_microbatches):
        if factor > 1 and is_change(factor * due):
            return words(
                f"the bias changes by {factor} × its step",
                f"it is updated {factor} times a step, as in a forward and its recomputation, or with a wrong rate",
            )
    own = {shard.rank: contributions[axes.data_index(shard.rank)].sum(0) for shard in suspect.wrong_shards}
    if all(_is_step(shard.value, own[shard.rank], rate) for shard in suspect.wrong_shards):
        return words(
            "the bias follows each rank's own counts", "the bias is updated before counts are summed over ranks"
        )
    return None


def balancing_step(counts_e: Array, rate: float) -> Array:
    """Return the change of the balancing bias for a step's counts (Wang et al. 2024, algorithm 1)."""
    return np.asarray(-rate * np.sign(counts_e * counts_e.size - counts_e.sum()), dtype=np.float64)


def _is_step(bias_e: Array, counts_e: Array, rate: float) -> bool:
    return np.allclose(bias_e, balancing_step(counts_e, rate), rtol=CLOSE, atol=CLOSE * rate)
