"""Diagnose wrong gradients from ratios, contributions to the reference gradient, and sums over replicas.

Causes are tried from simple to complex; the first that explains every wrong shard up to rounding is reported.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from meshwright.prove.compare.result import Diagnosis, FaultKind
from meshwright.prove.compare.tensor_shards import Array, LocalShard, max_difference
from meshwright.prove.diagnose.contributions import scale_diagnosis, weights_diagnosis
from meshwright.prove.diagnose.factors import NOTHING_FITS, close, factor_cause
from meshwright.prove.diagnose.fit_contributions import MIN_SPARE, FitProblem, common_factor, contribution_weights
from meshwright.prove.diagnose.phrases import EVERYWHERE, box_words, number_words, rank_words, scope_words
from meshwright.prove.diagnose.shared_parameters import StageContributions, diagnose_shared
from meshwright.prove.diagnose.suspect import (
    SuspectTensor,
    incomplete,
    misplaced,
    non_finite,
    replicas_differ,
    unrecognised,
    wrong_mask,
)


@dataclass(frozen=True)
class DiagnosisContext:
    """Results from the rest of the proof that the diagnosis of a tensor depends on."""

    references: Mapping[str, Array]
    """Reference tensors of the same kind, by name."""
    samples_wrong: bool = False
    initial_wrong: bool = False
    shared: StageContributions | None = None
    """Contribution of each stage to the gradients of shared parameters."""

    def root_fault(self) -> str:
        """Describe the fault that makes all later values wrong, or return an empty string."""
        return "initial weights that differ" if self.initial_wrong else "wrong samples" if self.samples_wrong else ""


def diagnose_gradient(suspect: SuspectTensor, context: DiagnosisContext) -> Diagnosis:
    """Return the likely cause of a wrong gradient."""
    return (
        incomplete(suspect)
        or non_finite(suspect)
        or _no_gradient(suspect)
        or _weighted_contributions(suspect)
        or _missing_reduction(suspect)
        or diagnose_shared(suspect, context.shared)
        or misplaced(suspect, context.references)
        or _wrong_region(suspect)
        or consequence(suspect, context)
        or replicas_differ(suspect)
        or unrecognised(suspect)
    )


def consequence(suspect: SuspectTensor, context: DiagnosisContext) -> Diagnosis | None:
    """Diagnose an error as the consequence of an upstream fault, if any."""
    root_fault = context.root_fault()
    if not root_fault:
        return None
    return Diagnosis(FaultKind.CONSEQUENCE, f"wrong {suspect.scope_text()}", f"follows from {root_fault}")


def _no_gradient(suspect: SuspectTensor) -> Diagnosis | None:
    if any(shard.value.any() for shard in suspect.wrong_shards):
        return None
    scope = suspect.scope_text()
    whose = "this parameter" if scope == EVERYWHERE else f"{rank_words(suspect.wrong_ranks)}'s shard of it"
    return Diagnosis(FaultKind.ZERO, f"zero {scope}", f"no gradient reached {whose}")


def _weighted_contributions(suspect: SuspectTensor) -> Diagnosis | None:
    """Diagnose a multiple of the reference, or missing or duplicated contributions."""
    weights = weights_by_rank(suspect, suspect.wrong_shards)
    if weights is None:
        return None
    return weights_diagnosis(weights, suspect.informative_ranks, suspect.counts)


def weights_by_rank(
    suspect: SuspectTensor, shards: Iterable[LocalShard], *, max_error: float = math.inf
) -> dict[int, Array] | None:
    """Return the weights of the contributions on each rank, or None if they do not explain all `shards`.

    Shards with equal weights are fitted together, since a small shard may have too few elements for a fit.

    Args:
        max_error: upper bound on the error to explain, if smaller than the error of `shards`.
    """
    chosen = list(shards)
    for key in (lambda rank: 0, suspect.counts.part, lambda rank: rank):
        pools: dict[int, list[LocalShard]] = defaultdict(list)
        for shard in chosen:
            pools[key(shard.rank)].append(shard)
        found: dict[int, Array] = {}
        for pool in pools.values():
            is_local = len({suspect.counts.part(shard.rank) for shard in pool}) == 1
            weights = contribution_weights(_fit_problem(suspect, pool, pool[0].rank if is_local else None, max_error))
            if weights is None:
                break
            found |= {shard.rank: weights for shard in pool}
        else:
            return dict(sorted(found.items()))
    return None


def _fit_problem(suspect: SuspectTensor, pool: list[LocalShard], rank: int | None, max_error: float) -> FitProblem:
    value_n = np.concatenate([shard.value.reshape(-1) for shard in pool])
    contributions = suspect.expected[None, None] if suspect.contributions is None else suspect.contributions
    inside = []
    for shard in pool:
        inside.append(contributions[(slice(None), slice(None), *shard.slices())].reshape(*contributions.shape[:2], -1))
    num_distinct = sum({(shard.start, shard.stop): shard.value.size for shard in pool}.values())
    return FitProblem(value_n, np.concatenate(inside, axis=2), suspect.counts, num_distinct, rank, max_error)


def _missing_reduction(suspect: SuspectTensor) -> Diagnosis | None:
    """Diagnose a missing reduction: replicas differ along some axes, and their sum there is the reference."""
    axes_apart = [mismatch.axis for mismatch in suspect.large_mismatches]
    for num in range(1, len(axes_apart) + 1):
        for chosen in itertools.combinations(axes_apart, num):
            cause = _reduction_cause(suspect, chosen)
            if cause is not None:
                mismatch = next(mismatch for mismatch in suspect.large_mismatches if mismatch.axis in chosen)
                symptom = f"replicas differ between {rank_words(mismatch.ranks)} along {' and '.join(chosen)}"
                detail = f"by up to {mismatch.largest:.2g} at {list(mismatch.index)}"
                return Diagnosis(FaultKind.SUM_MISSING, symptom, cause, detail)
    return None


def _reduction_cause(suspect: SuspectTensor, chosen: tuple[str, ...]) -> str | None:
    wrong = {id(shard) for shard in suspect.wrong_shards}
    groups = [group for group in suspect.assembly.replica_groups(chosen) if any(id(shard) in wrong for shard in group)]
    size, over = math.prod(suspect.counts.axes.size(axis) for axis in chosen), " and ".join(chosen)
    sums = [LocalShard(group[0].rank, group[0].start, np.sum([p.value for p in group], axis=0)) for group in groups]
    error = max(
        (max_difference(shard.value, shard.slice_of(suspect.expected))[0] for shard in suspect.wrong_shards),
        default=0.0,
    )
    if all(suspect.matches(shard.value, shard.slice_of(suspect.expected), error) for shard in sums):
        return f"the sum over {over} is missing: the replicas sum to the reference"
    weights = weights_by_rank(suspect, sums, max_error=error)
    if weights is None:
        return None
    first = next(iter(weights.values()))
    if all((found == first.flat[0]).all() for found in weights.values()):
        factor = float(first.flat[0])
        if close(factor, size, suspect.counts.rounding):
            return f"the mean over {over} is missing: the replicas average to the reference"
        why = factor_cause(factor, suspect.counts) or NOTHING_FITS
        return f"the sum over {over} is missing: the replicas sum to {number_words(factor)} × the reference ({why})"
    rest = weights_diagnosis(weights, [shard.rank for shard in sums], suspect.counts)
    return f"the sum over {over} is missing, and in the sum of the replicas {rest.symptom}: {rest.cause}"


def _wrong_region(suspect: SuspectTensor) -> Diagnosis | None:
    """Diagnose a tensor that is zero or a multiple of the reference in one region and correct elsewhere."""
    mask = wrong_mask(suspect)
    where = box_words(mask)
    if where == "everywhere" or int(mask.sum()) < MIN_SPARE:
        return None
    inside = [mask[shard.slices()] for shard in suspect.wrong_shards]
    value_n = np.concatenate([shard.value[at] for shard, at in zip(suspect.wrong_shards, inside, strict=True)])
    expected = [shard.slice_of(suspect.expected)[at] for shard, at in zip(suspect.wrong_shards, inside, strict=True)]
    expected_n = np.concatenate(expected)
    scope = f"at {where}, {scope_words(suspect.wrong_ranks, suspect.informative_ranks, suspect.counts.axes)}"
    if not value_n.any():
        return Diagnosis(FaultKind.ZERO, f"zero {scope}", "no gradient reached this region of the parameter")
    factor = common_factor(FitProblem(value_n, expected_n[None, None], suspect.counts, int(mask.sum())))
    return None if factor is None else scale_diagnosis(factor, scope, suspect.counts)
