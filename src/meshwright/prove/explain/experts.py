"""Causes of wrong gradients of experts, whose reductions differ from those of all other parameters, and of wrong counts
of their tokens.

An expert gets the tokens of all ranks in its group by the dispatch, so its gradient is summed only over the ranks that
hold the same experts, and never scaled by ep.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from meshwright.prove.explain.contributions import FitProblem, common_factor
from meshwright.prove.explain.gradients import incomplete, non_finite, replicas_differ, unrecognised, weights_by_rank
from meshwright.prove.judge.counts import CLOSE, NOTHING_FITS, LayoutCounts, close, factor_cause
from meshwright.prove.judge.judge import Comparison
from meshwright.prove.judge.tensors import Array, LocalShard, max_difference, max_magnitude, to_arrays
from meshwright.prove.judge.verdicts import SuspectTensor, Verdicts, any_wrong
from meshwright.prove.placement import ExpertPlacement
from meshwright.prove.result import Diagnosis, FaultKind, number_words, rank_words

SAME_EXPERTS = "the ranks that hold the same experts"


def narrow_to_experts(verdicts: Verdicts, experts: ExpertPlacement | None) -> Verdicts:
    """Replace the diagnoses of experts' gradients where the dispatch explains them, and other gradients don't have the
    same fault."""
    wrong = {name for name, verdict in verdicts.items() if not verdict.result.ok}
    if experts is None or not wrong & experts.parameters:
        return verdicts
    result, others = dict(verdicts), set()
    for name in wrong - experts.parameters:
        if (other := verdicts[name].result.diagnosis) is not None:
            others.add((other.kind, other.cause))
    for name in wrong & experts.parameters:
        known = verdicts[name].result.diagnosis
        if known is None or known.kind is FaultKind.CONSEQUENCE or (known.kind, known.cause) in others:
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
    symptom, size = f"{number_words(factor)} × the reference {suspect.scope_text()}", experts.size
    causes = []
    if close(factor, size):
        causes.append(f"multiplied by ep ({size}): an expert's gradient is a sum over tokens, without a factor of ep")
    elif close(factor, 1.0 / size):
        causes.append(f"averaged over ep ({size} ranks): tokens of all ep ranks are summed by the dispatch's backward")
    elif experts.num_groups > 1 and close(factor, experts.num_groups):
        causes.append(f"summed twice over {SAME_EXPERTS} ({experts.num_groups})")
    elif experts.num_groups > 1 and close(factor, 1.0 / experts.num_groups):
        causes.append(f"averaged instead of summed over {SAME_EXPERTS} ({experts.num_groups})")
    if not causes:
        return None
    other = factor_cause(factor, suspect.counts, max_rarity=2)
    return Diagnosis(FaultKind.SCALED, symptom, ", or ".join([*causes, *([other] if other else [])]), factor=factor)


def _missing_groups(weights: dict[int, Array], suspect: SuspectTensor, experts: ExpertPlacement) -> Diagnosis | None:
    """Diagnose gradients that contain only the tokens of a rank's own group, or of the rank itself."""
    axes = suspect.counts.axes
    for whose, same in (
        ("its own group of ep ranks", lambda a, b: experts.group(a) == experts.group(b)),
        ("the rank that holds the expert", lambda a, b: a == b),
    ):
        factors = set()
        for rank, found in weights.items():
            own = np.array([same(d, axes.data_index(rank)) for d in range(len(found))])
            if found[~own].any() or (found[own] != found[own][0, 0]).any():
                break
            factors.add(float(found[own][0, 0]))
        else:
            if len(factors) == 1:
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
    parts = _parts(suspect)
    factors, holds = {}, {}
    for expert, shards in parts.items():
        if not any(_is_wrong(suspect, shard) for shard in shards):
            continue
        factor = _factor(suspect, shards)
        other = None if factor is not None else _other_expert(suspect, shards, expert)
        if factor is None and other is None:
            return None
        if factor is not None:
            factors[expert] = factor
        if other is not None:
            holds[expert] = other
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


def _parts(suspect: SuspectTensor) -> dict[int, list[LocalShard]]:
    """Return the shards of each expert."""
    parts: dict[int, list[LocalShard]] = defaultdict(list)
    for shard in suspect.assembly.shards:
        for row in range(shard.value.shape[0]):
            start = (shard.start[0] + row, *shard.start[1:])
            parts[start[0]].append(LocalShard(shard.rank, start, shard.value[row : row + 1]))
    return parts


def _is_wrong(suspect: SuspectTensor, shard: LocalShard) -> bool:
    return max_difference(shard.value, shard.slice_of(suspect.expected))[0] > suspect.tolerance * suspect.scale


def _factor(suspect: SuspectTensor, shards: list[LocalShard]) -> float | None:
    value_n = np.concatenate([shard.value.reshape(-1) for shard in shards])
    if not value_n.any():
        return 0.0
    expected_n = np.concatenate([shard.slice_of(suspect.expected).reshape(-1) for shard in shards])
    return common_factor(FitProblem(value_n, expected_n[None, None], suspect.counts, value_n.size))


def _other_expert(suspect: SuspectTensor, shards: list[LocalShard], expert: int) -> int | None:
    error = max(max_difference(shard.value, shard.slice_of(suspect.expected))[0] for shard in shards)
    for other in range(suspect.expected.shape[0]):
        moved = [LocalShard(shard.rank, (other, *shard.start[1:]), shard.value) for shard in shards]
        if other != expert and all(suspect.matches(m.value, m.slice_of(suspect.expected), error) for m in moved):
            return other
    return None


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
            found = diagnose_bias(change, held, contributions, sides.expected.bias_rates[counts])
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
    suspect: SuspectTensor, held_counts: dict[int, Array], contributions: Array, rate: float
) -> Diagnosis | None:
    """Return the cause of a wrong balancing bias after a step, if recognised.

    Args:
        suspect: the bias.
        held_counts: the layout's counts of the step, by rank.
        contributions: [data-parallel rank, micro-batch, expert]: right counts of the step.
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
