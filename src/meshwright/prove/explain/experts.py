"""Causes of wrong gradients of experts, whose reductions differ from those of all other parameters, and of wrong counts
of their tokens.

An expert gets the tokens of all ranks in its group by the dispatch, so its gradient is summed only over the ranks that
hold the same experts, and never scaled by ep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from meshwright.prove.explain.contributions import FitProblem, common_factor
from meshwright.prove.explain.gradients import incomplete, non_finite, replicas_differ, unrecognised, weights_by_rank
from meshwright.prove.judge.judge import Comparison
from meshwright.prove.judge.tensors import (
    CLOSE,
    NOTHING_FITS,
    Array,
    LayoutCounts,
    close,
    factor_cause,
    max_magnitude,
    to_arrays,
)
from meshwright.prove.judge.verdicts import SuspectTensor, Verdicts, any_wrong
from meshwright.prove.placement import ExpertPlacement
from meshwright.prove.result import Diagnosis, FaultKind, number_words, rank_words

SAME_EXPERTS = "the ranks that hold the same experts"


def narrow_to_experts(verdicts: Verdicts, experts: ExpertPlacement | None) -> Verdicts:
    """Replace the diagnoses of experts' gradients where the dispatch explains them, and other gradients don't have the
    same fault."""
    if experts is None:
        return verdicts
    wrong = {name: one.result.diagnosis for name, one in verdicts.items() if not one.result.ok and one.result.diagnosis}
    others = {(one.kind, one.cause) for name, one in wrong.items() if name not in experts.parameters}
    result = dict(verdicts)
    for name, known in wrong.items():
        if name not in experts.parameters or known.kind is FaultKind.CONSEQUENCE or (known.kind, known.cause) in others:
            continue
        found = _diagnose(verdicts[name].suspect, experts)
        if found is not None:
            result[name] = verdicts[name].with_diagnosis(found)
    return result


def _diagnose(suspect: SuspectTensor, experts: ExpertPlacement) -> Diagnosis | None:
    if suspect.assembly.faults or not all(np.isfinite(shard.value).all() for shard in suspect.wrong_shards):
        return None
    return _wrong_reduction(suspect, experts) or _wrong_experts(suspect, experts)


def _wrong_reduction(suspect: SuspectTensor, experts: ExpertPlacement) -> Diagnosis | None:
    weights = weights_by_rank(suspect, suspect.wrong_shards)
    if weights is None or experts.size == 1:
        return None
    found = list(weights.values())
    factor = float(found[0].flat[0])
    if all((each == factor).all() for each in found):
        return _scaled(factor, suspect, experts)
    return _missing_groups(weights, suspect, experts)


def _scaled(factor: float, suspect: SuspectTensor, experts: ExpertPlacement) -> Diagnosis | None:
    """Diagnose a factor of ep, or of the number of ranks that hold the same experts."""
    size, groups = experts.size, experts.num_groups
    sizes = (
        (size, f"multiplied by ep ({size}): an expert's gradient is a sum over tokens, without a factor of ep"),
        (1 / size, f"averaged over ep ({size} ranks): tokens of all ep ranks are summed by the dispatch's backward"),
        (groups, f"summed twice over {SAME_EXPERTS} ({groups})"),
        (1 / groups, f"averaged instead of summed over {SAME_EXPERTS} ({groups})"),
    )
    cause = next((words for number, words in sizes if number != 1 and close(factor, number)), None)
    if cause is None:
        return None
    symptom = f"{number_words(factor)} × the reference {suspect.scope_text()}"
    other = factor_cause(factor, suspect.counts, max_rarity=2)
    return Diagnosis(FaultKind.SCALED, symptom, f"{cause}, or {other}" if other else cause, factor=factor)


def _missing_groups(weights: dict[int, Array], suspect: SuspectTensor, experts: ExpertPlacement) -> Diagnosis | None:
    """Diagnose gradients that contain only the tokens of a rank's own group, or of the rank itself."""
    for whose, size in (("its own group of ep ranks", experts.size), ("the rank that holds the expert", 1)):
        parts = [
            (found, np.arange(len(found)) // size == suspect.counts.axes.data_index(rank) // size)
            for rank, found in weights.items()
        ]
        factors = {float(factor) for found, is_own in parts for factor in found[is_own].flat}
        if len(factors) == 1 and not any(found[~is_own].any() for found, is_own in parts):
            return _missing_words(whose, factors.pop(), experts)
    return None


def _missing_words(whose: str, factor: float, experts: ExpertPlacement) -> Diagnosis:
    times = "" if factor == 1.0 else f"{number_words(factor)} × "
    symptom = f"{times}only the tokens of {whose}"
    if "group" not in whose:
        cause = "tokens of other ep ranks are missing: the backward of the combine does not return their gradients"
    else:
        op = "mean" if close(factor, experts.num_groups) and factor != 1.0 else "sum"
        cause = f"the {op} over {SAME_EXPERTS} ({experts.num_groups}) is missing"
    return Diagnosis(FaultKind.SUM_MISSING, symptom, cause)


def _wrong_experts(suspect: SuspectTensor, experts: ExpertPlacement) -> Diagnosis | None:
    """Diagnose some experts with a multiple of their gradient, or with another expert's."""
    found_e = np.stack([replica.value for replica in suspect.assembly.replicas()], 1)
    due_e = np.broadcast_to(suspect.expected[:, None], found_e.shape)
    error_e = np.abs(found_e - due_e).reshape(len(due_e), -1).max(1)
    factors, holds = {}, {}
    for expert in np.flatnonzero(error_e > suspect.tolerance * suspect.scale).tolist():
        found, error = found_e[expert], float(error_e[expert])
        others = (e for e, due in enumerate(due_e) if e != expert and suspect.matches(found, due, error))
        problem = FitProblem(found.ravel(), due_e[expert].reshape(1, 1, -1), suspect.counts, found.size)
        if (factor := common_factor(problem) if found.any() else 0.0) is not None:
            factors[expert] = factor
        elif (other := next(others, None)) is not None:
            holds[expert] = other
        else:
            return None
    if holds and not factors:
        return _exchanged(holds, experts)
    if not factors or holds or len(set(factors.values())) > 1 or len(factors) == experts.num_experts:
        return None
    factor = next(iter(factors.values()))
    where = f"for {experts.describe(factors)}, and other experts are right"
    if factor == 0.0:
        return Diagnosis(FaultKind.ZERO, f"zero {where}", "no gradient reached these experts")
    symptom = f"{number_words(factor)} × the reference {where}"
    cause = factor_cause(factor, suspect.counts) or NOTHING_FITS
    return Diagnosis(FaultKind.SCALED, symptom, cause, factor=factor)


def _exchanged(holds: dict[int, int], experts: ExpertPlacement) -> Diagnosis:
    a, b = next(iter(holds.items()))
    have = "have other experts' gradients" if len(holds) > 1 else "has another expert's gradient"
    symptom = f"{experts.describe(holds)} {have}: expert {a} that of expert {b}"
    return Diagnosis(FaultKind.MISPLACED, symptom, "experts are exchanged: their order on the ranks is wrong")


def explain_buffer(comparison: Comparison, step: int, name: str) -> Diagnosis:
    """Return the cause of a wrong saved buffer after a step: counts of experts' tokens, a bias, or another."""
    sides, one = comparison.sides, comparison.steps[step - 1]
    suspect, experts = one.updates[name].suspect, sides.evidence.experts
    found, counts = incomplete(suspect) or non_finite(suspect), f"{name.rpartition('.')[0]}.value"
    parts = sides.contributions(step).counts.get(counts) if found is None and experts is not None else None
    if parts is not None and experts is not None:
        contributions, change = to_arrays({"": parts})[""], _change(comparison, step, name)
        if name == counts:
            found = diagnose_counts(change, contributions, experts)
        else:
            held = {shard.rank: shard.value for shard in _change(comparison, step, counts).assembly.shards}
            rate, total = sides.expected.bias_rates[counts], one.updates[counts].suspect.expected
            found = diagnose_bias(change, held, contributions, rate, total)
    if found is None and (not one.loss.ok or any_wrong(one.gradients)):
        found = Diagnosis(FaultKind.CONSEQUENCE, f"wrong {suspect.scope_text()}", "follows from a wrong forward")
    return found or replicas_differ(suspect) or unrecognised(suspect)


def _change(comparison: Comparison, step: int, name: str) -> SuspectTensor:
    """Return what a step adds to a buffer, on ranks and in the reference."""
    suspect = comparison.steps[step - 1].updates[name].suspect
    before = to_arrays({"": comparison.sides.weights[step - 1][name]})[""]
    shards = tuple(replace(s, value=s.value - s.slice_of(before)) for s in suspect.assembly.shards)
    expected = suspect.expected - before
    size = max_magnitude(expected) or suspect.scale
    tolerance = suspect.tolerance * suspect.scale / size
    return replace(
        suspect, assembly=replace(suspect.assembly, shards=shards), expected=expected, scale=size, tolerance=tolerance
    )


def diagnose_counts(suspect: SuspectTensor, contributions: Array, experts: ExpertPlacement) -> Diagnosis | None:
    """Return the cause of wrong counts of experts' tokens after a step, if recognised.

    Args:
        suspect: the counts.
        contributions: [data-parallel rank, micro-batch, expert]: counts of the step, which sum to the expected ones.
        experts: placement of the experts.
    """
    suspect = replace(suspect, find_contributions=lambda: contributions)
    weights = weights_by_rank(suspect, suspect.wrong_shards)
    if weights is None:
        return _fewer_choices(suspect)
    scope, first = suspect.scope_text(), next(iter(weights.values()))
    if all((each == first.flat[0]).all() for each in weights.values()):
        factor = float(first.flat[0])
        symptom = f"counts of experts' tokens are {number_words(factor)} × the reference {scope}"
        return Diagnosis(FaultKind.COUNTS, symptom, _recounted(factor, suspect.counts, experts), factor=factor)
    return Diagnosis(FaultKind.COUNTS, *_counted_words(weights, scope, suspect.counts))


def _fewer_choices(suspect: SuspectTensor) -> Diagnosis | None:
    """Diagnose counts of which none is larger than the right one."""
    values, due_e = [shard.value for shard in suspect.wrong_shards], suspect.expected
    found_e = values[0]
    if any(value.shape != due_e.shape or (value != found_e).any() or (value > due_e).any() for value in values):
        return None
    share = float(due_e.sum() / found_e.sum()) if found_e.sum() else 0.0
    only = f", as many as if one of each token's {round(share)} choices is counted" if share == round(share) > 1 else ""
    symptom = f"counts miss {due_e.sum() - found_e.sum():.0f} of {due_e.sum():.0f} choices {suspect.scope_text()}"
    return Diagnosis(FaultKind.COUNTS, symptom, f"some choices of experts are not counted{only}")


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
    suspect: SuspectTensor, held_counts: dict[int, Array], contributions: Array, rate: float, total: Array
) -> Diagnosis | None:
    """Return the cause of a wrong balancing bias after a step, if recognised.

    Args:
        suspect: the bias.
        held_counts: the layout's counts of the step, by rank.
        contributions: [data-parallel rank, micro-batch, expert]: right counts of the step.
        rate: step by which the bias changes.
        total: right counts since the first step.
    """
    num_microbatches, axes = contributions.shape[1], suspect.counts.axes
    ranks = [shard.rank for shard in suspect.wrong_shards]

    def is_change(changes: Mapping[int, Array]) -> bool:
        """Return whether the bias of each wrong rank changes by what is given for it."""
        return all(
            shard.rank in changes and np.allclose(shard.value, changes[shard.rank], rtol=CLOSE, atol=CLOSE * rate)
            for shard in suspect.wrong_shards
        )

    if is_change({rank: balancing_step(counts_e, rate) for rank, counts_e in held_counts.items()}):
        symptom = f"wrong {suspect.scope_text()}"
        return Diagnosis(FaultKind.CONSEQUENCE, symptom, "follows from wrong counts of experts' tokens")
    due = balancing_step(contributions.sum((0, 1)), rate)
    by_microbatch = np.sum([balancing_step(counts_e, rate) for counts_e in contributions.sum(0)], axis=0)
    own = {rank: balancing_step(contributions[axes.data_index(rank)].sum(0), rate) for rank in ranks}
    again = "it is updated {} times a step, as in a forward and its recomputation, or with a wrong rate"
    factors = [n for n in (2, 3, 4, num_microbatches, 2 * num_microbatches) if n > 1]
    for symptom, cause, changes in (
        ("the bias changes in the opposite direction", "the sign is flipped: busy experts get more tokens",
         dict.fromkeys(ranks, -due)),
        ("the bias does not change", "the bias is not updated", dict.fromkeys(ranks, 0 * due)),
        *([("the bias changes once per micro-batch", "the bias is updated from each micro-batch's counts",
            dict.fromkeys(ranks, by_microbatch))] if num_microbatches > 1 else []),
        *((f"the bias changes by {n} × its step", again.format(n), dict.fromkeys(ranks, n * due)) for n in factors),
        ("the bias follows the counts of all steps so far", "the bias is updated from the load since the first step",
         dict.fromkeys(ranks, balancing_step(total, rate))),
        ("the bias follows each rank's own counts", "the bias is updated before counts are summed over ranks", own),
    ):  # fmt: skip
        if is_change(changes):
            return Diagnosis(FaultKind.COUNTS, f"{symptom} {suspect.scope_text()}", cause)
    return None


def balancing_step(counts_e: Array, rate: float) -> Array:
    """Return the change of the balancing bias for a step's counts (Wang et al. 2024, algorithm 1)."""
    return np.asarray(-rate * np.sign(counts_e * counts_e.size - counts_e.sum()), dtype=np.float64)
