"""Name the cause of a wrong gradient whose values are rounded: contributions that are missing, doubled or scaled.

As in `diagnose`, a gradient is fitted as a weighted sum of the contributions of micro-batches and data-parallel ranks.
Rounding leaves the weights uncertain, so they are moved to plausible ones, which must then explain the gradient within
its tolerance.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshwright.prove.compare.result import Diagnosis, FaultKind
from meshwright.prove.compare.tensor_shards import Array, AssembledTensor, LocalShard
from meshwright.prove.diagnose.contributions import weights_diagnosis
from meshwright.prove.diagnose.factors import LayoutCounts
from meshwright.prove.diagnose.phrases import EVERYWHERE, rank_words, scope_words
from meshwright.units import join_words

SLACK = 1.5
"""Factor on the tolerance within which a cause explains a gradient: a fault may add to rounding errors."""
PROGRESS = 0.4
"""Largest fraction of the error that a cause may leave unexplained."""


@dataclass(frozen=True, eq=False)
class NoisyGradient:
    """A recorded gradient with its reference and tolerance."""

    assembly: AssembledTensor
    contributions: Array
    """[data-parallel rank, micro-batch, *shape]"""
    tolerance: float
    counts: LayoutCounts

    @cached_property
    def expected(self) -> Array:
        return np.asarray(self.contributions.sum(axis=(0, 1)))

    def error(self) -> float:
        """Return the largest relative error of a replica; infinity if a value is missing or not finite."""
        if self.assembly.faults or not self.assembly.shards:
            return 0.0 if not self.expected.size else float("inf")
        size = float(np.linalg.norm(self.expected))
        errors = [float(np.linalg.norm(replica.value - self.expected)) for replica in self.assembly.replicas()]
        return max((e / size if size else float(e > 0)) if np.isfinite(e) else float("inf") for e in errors)

    @cached_property
    def wrong_shards(self) -> list[LocalShard]:
        """Shards whose error exceeds the tolerance, relative to the larger of their own and their share of the norm."""
        size = float(np.linalg.norm(self.expected))
        found = []
        for shard in self.assembly.shards:
            target = shard.slice_of(self.expected)
            share = size * (shard.value.size / self.expected.size) ** 0.5
            limit = self.tolerance * max(float(np.linalg.norm(target)), share)
            if not np.linalg.norm(shard.value - target) <= limit:
                found.append(shard)
        return found

    @cached_property
    def informative_ranks(self) -> list[int]:
        """Ranks whose shard tells something: wrong ones, and those where the reference is not zero."""
        nonzero = {shard.rank for shard in self.assembly.shards if shard.slice_of(self.expected).any()}
        return sorted(nonzero | {shard.rank for shard in self.wrong_shards})

    def explains(self, value_n: Array, target_n: Array, own_n: Array) -> bool:
        """Return whether `target_n` equals `value_n` within rounding, and much better than the reference `own_n`."""
        left = float(np.linalg.norm(value_n - target_n))
        size = max(float(np.linalg.norm(target_n)), float(np.linalg.norm(own_n)))
        return left <= SLACK * self.tolerance * size and left <= PROGRESS * float(np.linalg.norm(value_n - own_n))


def diagnose(gradient: NoisyGradient) -> Diagnosis:
    """Return the likely cause of a wrong gradient."""
    return (
        _incomplete(gradient)
        or _non_finite(gradient)
        or _zero(gradient)
        or _weighted(gradient)
        or _missing_sum(gradient)
        or _replicas_differ(gradient)
        or _unrecognised(gradient)
    )


def _scope(gradient: NoisyGradient, shards: Iterable[LocalShard]) -> str:
    return scope_words({shard.rank for shard in shards}, gradient.informative_ranks, gradient.counts.axes)


def _incomplete(gradient: NoisyGradient) -> Diagnosis | None:
    faults = gradient.assembly.faults
    if not gradient.assembly.shards:
        return Diagnosis(FaultKind.ZERO, f"no gradient {EVERYWHERE}", "no gradient reached this parameter")
    return Diagnosis(FaultKind.EVIDENCE, "the shards do not make up the tensor", "; ".join(faults)) if faults else None


def _non_finite(gradient: NoisyGradient) -> Diagnosis | None:
    bad = [shard for shard in gradient.assembly.shards if not np.isfinite(shard.value).all()]
    cause = "NaN or infinity entered the computation"
    return Diagnosis(FaultKind.NON_FINITE, f"not finite {_scope(gradient, bad)}", cause) if bad else None


def _zero(gradient: NoisyGradient) -> Diagnosis | None:
    wrong = gradient.wrong_shards
    if not wrong or any(shard.value.any() for shard in wrong):
        return None
    scope = _scope(gradient, wrong)
    whose = "this parameter" if scope == EVERYWHERE else f"the shard of {rank_words({s.rank for s in wrong})}"
    return Diagnosis(FaultKind.ZERO, f"zero {scope}", f"no gradient reached {whose}")


def _weighted(gradient: NoisyGradient) -> Diagnosis | None:
    """Diagnose a multiple of the reference, or missing or repeated contributions."""
    weights = _weights_by_rank(gradient, gradient.wrong_shards)
    if weights is None:
        return None
    ranks = gradient.informative_ranks
    if len(ranks) == 1:  # as good as all ranks: the shards of others are zero
        weights = dict.fromkeys(gradient.assembly.ranks(), weights[ranks[0]])
    return weights_diagnosis(weights, sorted({*ranks, *weights}), gradient.counts)


def _weights_by_rank(gradient: NoisyGradient, shards: list[LocalShard]) -> dict[int, Array] | None:
    """Return the weights of the contributions on each rank, or None if they don't explain all shards."""
    for key in (lambda rank: 0, gradient.counts.part, lambda rank: rank):
        pools: dict[int, list[LocalShard]] = defaultdict(list)
        for shard in shards:
            pools[key(shard.rank)].append(shard)
        found: dict[int, Array] = {}
        for pool in pools.values():
            weights = _fit(gradient, pool)
            if weights is None:
                break
            found |= {shard.rank: weights for shard in pool}
        else:
            return dict(sorted(found.items())) or None
    return None


def _fit(gradient: NoisyGradient, pool: list[LocalShard]) -> Array | None:
    value_n = np.concatenate([shard.value.reshape(-1) for shard in pool])
    grid = gradient.contributions.shape[:2]
    parts = [gradient.contributions[(slice(None), slice(None), *s.slices())].reshape(*grid, -1) for s in pool]
    inside_cn = np.concatenate(parts, axis=2).reshape(-1, value_n.size)
    own_n = inside_cn.sum(axis=0)
    size = float(own_n @ own_n)
    candidates = [np.full(len(inside_cn), _snap(float(value_n @ own_n) / size, gradient.counts))] if size else []
    if value_n.size > 2 * len(inside_cn):
        found = np.linalg.lstsq(inside_cn.T, value_n, rcond=None)[0]
        candidates.append(np.array([_snap(float(w), gradient.counts) for w in found]))
    for weights in candidates:
        if (weights != 1).any() and gradient.explains(value_n, weights @ inside_cn, own_n):
            return np.asarray(weights.reshape(grid))
    return None


def _snap(weight: float, counts: LayoutCounts) -> float:
    """Return the plausible weight next to a fitted one."""
    known = [0.0, -1.0, *counts.factors()]
    return min(known, key=lambda value: abs(value - weight))


def _missing_sum(gradient: NoisyGradient) -> Diagnosis | None:
    """Diagnose replicas that differ along some axes and sum to the reference there."""
    for num in range(1, len(gradient.assembly.replicated) + 1):
        for axes in itertools.combinations(gradient.assembly.replicated, num):
            groups = gradient.assembly.replica_groups(axes)
            sums = [np.sum([shard.value for shard in group], axis=0).reshape(-1) for group in groups]
            own = [group[0].slice_of(gradient.expected).reshape(-1) for group in groups]
            found = np.concatenate([group[0].value.reshape(-1) for group in groups])
            total_n, own_n = np.concatenate(sums), np.concatenate(own)
            size = float(np.linalg.norm(own_n))
            left = float(np.linalg.norm(total_n - own_n))
            if left <= SLACK * gradient.tolerance * size and left <= PROGRESS * float(np.linalg.norm(found - own_n)):
                over = join_words(axes)
                symptom = f"replicas differ between {rank_words(s.rank for s in groups[0])} along {over}"
                cause = f"the sum over {over} is missing: the replicas sum to the reference"
                return Diagnosis(FaultKind.SUM_MISSING, symptom, cause)
    return None


def _replicas_differ(gradient: NoisyGradient) -> Diagnosis | None:
    size = float(np.linalg.norm(gradient.expected))
    for mismatch in gradient.assembly.mismatches:
        groups = gradient.assembly.replica_groups((mismatch.axis,))
        apart = [float(np.linalg.norm(other.value - first.value)) for first, *others in groups for other in others]
        if max(apart) > gradient.tolerance * size:
            symptom = f"replicas differ between {rank_words(mismatch.ranks)} along {mismatch.axis}"
            cause = f"the ranks along {mismatch.axis} compute different values where they should agree"
            return Diagnosis(FaultKind.REPLICAS_DIFFER, symptom, cause)
    return None


def _unrecognised(gradient: NoisyGradient) -> Diagnosis:
    scope = _scope(gradient, gradient.wrong_shards) if gradient.wrong_shards else EVERYWHERE
    return Diagnosis(FaultKind.UNRECOGNISED, f"wrong {scope}", "not recognised")
