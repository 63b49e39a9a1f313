"""Diagnose wrong gradients of experts, whose reductions differ from those of all other parameters.

An expert gets the tokens of all ranks in its group by the dispatch, so its gradient is summed only over the ranks that
hold the same experts, and never scaled by ep.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from meshwright.prove.compare.result import Diagnosis, FaultKind
from meshwright.prove.compare.tensor_shards import Array, LocalShard, max_difference
from meshwright.prove.compare.tensor_verdict import Verdicts
from meshwright.prove.diagnose.factors import NOTHING_FITS, close, factor_cause
from meshwright.prove.diagnose.fit_contributions import FitProblem, common_factor
from meshwright.prove.diagnose.gradients import weights_by_rank
from meshwright.prove.diagnose.phrases import number_words
from meshwright.prove.diagnose.suspect import SuspectTensor
from meshwright.prove.placement import ExpertPlacement

SAME_EXPERTS = "the ranks that hold the same experts"


def narrow_to_experts(verdicts: Verdicts, experts: ExpertPlacement | None) -> Verdicts:
    """Replace the diagnoses of experts' gradients where the dispatch explains them, if only experts are wrong."""
    wrong = {name for name, verdict in verdicts.items() if not verdict.result.ok}
    if experts is None or not wrong or not wrong <= experts.parameters:
        return verdicts
    result = dict(verdicts)
    for name in wrong:
        known = verdicts[name].result.diagnosis
        found = _diagnose(verdicts[name].suspect, experts)
        if found is not None and known is not None and known.kind is not FaultKind.CONSEQUENCE:
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
