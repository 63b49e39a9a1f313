"""Verdicts on tensors and series: the largest error against a tolerance.

In float64, the error of a tensor is its largest deviation divided by its scale, the largest magnitude in the reference
tensor. If the reference is zero or rounding noise (below `NOISE` times the largest magnitude of all tensors), like the
gradient of a key bias under softmax, the scale is the largest magnitude of all tensors. Where values are rounded, the
error is that of the norms: single elements are as far off as rounding takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from meshwright.prove.judge.tensors import (
    Array,
    AssembledTensor,
    LayoutCounts,
    LocalShard,
    ReplicaMismatch,
    assemble,
    max_difference,
    max_magnitude,
    measure_deviation,
    safe_ratio,
)
from meshwright.prove.record.evidence import Shards
from meshwright.prove.result import MISSING, Deviation, Diagnosis, StepValue, TensorResult, scope_words

NOISE = 1e-14
"""Relative magnitude below which a reference tensor counts as noise: sums that cancel leave about 1e-16 of their terms,
and a true gradient this small has no effect."""
NEGLIGIBLE = 1e-14
"""Fraction of the scale below which a reference shard is too small to tell whether its rank is correct."""
RESIDUAL = 1e-11
"""Largest residual of an explanation relative to the largest value: the rounding of a few thousand additions."""
PROGRESS = 1e-3
"""Largest residual relative to the error to explain: a fit with a factor of 1 + 1e-12 explains nothing."""
NOISY_RESIDUAL = 1.5
"""Largest residual of an explanation of rounded values, relative to their tolerance: a fault may add to rounding."""
NOISY_PROGRESS = 0.4
"""Largest residual of an explanation of rounded values, relative to the error to explain."""


@dataclass(frozen=True, eq=False)
class SuspectTensor:
    """Tensor of the layout together with its reference."""

    assembly: AssembledTensor
    expected: Array
    scale: float
    tolerance: float
    counts: LayoutCounts
    noisy: bool = False
    """Whether values are rounded, and errors those of norms."""
    find_contributions: Callable[[], Array | None] = field(default=lambda: None, repr=False)
    """Compute the contributions to a gradient, which sum to `expected`: [data-parallel rank, micro-batch, *shape]."""
    telling: tuple[int, ...] | None = None
    """Ranks whose shard can be checked, if they can't be told from the reference."""

    @cached_property
    def contributions(self) -> Array | None:
        """Contributions to a gradient, or None if they are not known."""
        return self.find_contributions()

    @cached_property
    def wrong_shards(self) -> tuple[LocalShard, ...]:
        """Shards that exceed the tolerance; if a rounded tensor does, but none of its shards by itself, those that add
        most to its error."""
        found = tuple(shard for shard in self.assembly.shards if not self._is_right(shard))
        if found or not self.noisy or self.error().relative <= self.tolerance:
            return found
        errors = [self.distance(shard.value, shard.slice_of(self.expected)) for shard in self.assembly.shards]
        return tuple(
            shard for shard, error in zip(self.assembly.shards, errors, strict=True) if error >= max(errors) / 2
        )

    def _is_right(self, shard: LocalShard) -> bool:
        due = shard.slice_of(self.expected)
        size = self.scale
        if self.noisy:  # of its own norm, or its share of the whole
            share = float(np.linalg.norm(self.expected)) * (shard.value.size / self.expected.size) ** 0.5
            size = max(float(np.linalg.norm(due)), share)
        return self.distance(shard.value, due) <= self.tolerance * size

    @cached_property
    def wrong_ranks(self) -> list[int]:
        return sorted({shard.rank for shard in self.wrong_shards})

    @cached_property
    def informative_ranks(self) -> list[int]:
        """Ranks whose shard can be checked: wrong ones and those with a non-negligible reference shard."""
        if self.telling is not None:
            return sorted({*self.telling, *self.wrong_ranks})
        nonzero = {
            p.rank for p in self.assembly.shards if max_magnitude(p.slice_of(self.expected)) > NEGLIGIBLE * self.scale
        }
        return sorted(nonzero | set(self.wrong_ranks))

    @cached_property
    def large_mismatches(self) -> list[ReplicaMismatch]:
        """Replica mismatches that exceed the tolerance."""
        if not self.noisy:
            return [mismatch for mismatch in self.assembly.mismatches if mismatch.largest > self.tolerance * self.scale]
        found, size = [], float(np.linalg.norm(self.expected))
        for mismatch in self.assembly.mismatches:
            groups = self.assembly.replica_groups((mismatch.axis,))
            apart = [self.distance(other.value, first.value) for first, *others in groups for other in others]
            found += [mismatch] if max(apart) > self.tolerance * size else []
        return found

    def scope_text(self) -> str:
        """Format the wrong ranks: `on every rank`, `only on rank 3`."""
        return scope_words(self.wrong_ranks, self.informative_ranks, self.counts.axes)

    def distance(self, value: Array, target: Array) -> float:
        """Return how far a value is from another: the largest difference or, of rounded ones, its norm."""
        if not self.noisy:
            return max_difference(value, target)[0] if value.size else 0.0
        with np.errstate(invalid="ignore", over="ignore"):
            found = float(np.linalg.norm(value - target))
        return found if np.isfinite(found) else float("inf")

    def matches(self, value: Array, target: Array, error: float) -> bool:
        """Return whether `value` equals `target` up to rounding, given the distance `error` to explain."""
        left = self.distance(value, target)
        size = max(self.distance(value, 0 * value), self.distance(target, 0 * target))
        if self.noisy:
            return left <= NOISY_RESIDUAL * self.tolerance * size and left <= NOISY_PROGRESS * error
        return left <= max(RESIDUAL, self.tolerance) * size and left <= max(PROGRESS, self.counts.rounding) * error

    def error(self) -> Deviation:
        """Return the largest error of any rank; that of a missing tensor if the shards don't form it."""
        is_complete = bool(self.assembly.shards or not self.expected.size) and not self.assembly.faults
        if not is_complete or not np.isfinite(self.expected).all():
            return MISSING
        found = measure_deviation(self.assembly, self.expected, self.scale)
        if not self.noisy or not self.assembly.shards:
            return found
        size = float(np.linalg.norm(self.expected))
        worst = max(self.distance(replica.value, self.expected) for replica in self.assembly.replicas())
        return replace(found, relative=worst / size if size else float(worst > 0))


@dataclass(frozen=True, eq=False)
class TensorVerdict:
    """Verdict on a tensor, with the data needed to diagnose it."""

    result: TensorResult
    suspect: SuspectTensor

    def with_diagnosis(self, diagnosis: Diagnosis) -> TensorVerdict:
        """Return a copy with `diagnosis` set."""
        return replace(self, result=replace(self.result, diagnosis=diagnosis))


Verdicts = dict[str, TensorVerdict]


def any_wrong(verdicts: Verdicts) -> bool:
    """Return whether any tensor exceeds the tolerance."""
    return not all(verdict.result.ok for verdict in verdicts.values())


def wrong_names(verdicts: Verdicts) -> list[str]:
    """Return the names of the tensors that exceed their tolerance."""
    return [name for name, verdict in verdicts.items() if not verdict.result.ok]


def expected_of(verdicts: Verdicts) -> dict[str, Array]:
    """Return the reference tensors."""
    return {name: verdict.suspect.expected for name, verdict in verdicts.items()}


def compare_tensors(
    shards: Shards,
    references: Mapping[str, Array],
    counts: LayoutCounts,
    tolerance: float | Mapping[str, float],
    *,
    step: int = 0,
    noisy: bool = False,
    contributions: Callable[[str], Array | None] | None = None,
) -> Verdicts:
    """Compare the shards with all reference tensors of one kind, such as gradients.

    Args:
        shards: shards of each tensor.
        references: full tensors.
        counts: sizes of the layout.
        tolerance: relative tolerance, of all tensors or of each.
        step: step that the tensors are of.
        noisy: whether values are rounded, so that errors are those of norms.
        contributions: function from a name to the contributions to a gradient.
    """
    scales, found = tensor_scales(references), {}
    for name, expected in references.items():
        suspect = SuspectTensor(
            assemble(name, shards.get(name, []), expected.shape, counts.axes),
            expected,
            scales[name],
            tolerance if isinstance(tolerance, float) else tolerance[name],
            counts,
            noisy,
            (lambda name=name: contributions(name)) if contributions is not None else (lambda: None),  # type: ignore[misc]
        )
        found[name] = TensorVerdict(verdict_on(suspect, suspect.error(), step), suspect)
    return found


def verdict_on(suspect: SuspectTensor, error: Deviation, step: int) -> TensorResult:
    """Return the verdict on a tensor, given its error."""
    assembly = suspect.assembly
    difference = assembly.mismatches[0].largest if assembly.mismatches else 0.0
    return TensorResult(
        error=error,
        tolerance=suspect.tolerance,
        ok=error.relative <= suspect.tolerance,
        replicated=assembly.replicated,
        num_replicas=assembly.num_replicas(),
        replicas_equal=not assembly.mismatches,
        replicas_agree=safe_ratio(difference, suspect.scale) <= 2 * suspect.tolerance,
        max_replica_difference=difference,
        step=step,
    )


def tensor_scales(references: Mapping[str, Array]) -> dict[str, float]:
    """Return the scale of each tensor, by which errors are divided."""
    magnitudes = {name: max_magnitude(expected) for name, expected in references.items()}
    overall = max((scale for scale in magnitudes.values() if np.isfinite(scale)), default=0.0)
    return {name: scale if scale > NOISE * overall else overall for name, scale in magnitudes.items()}


def compare_step(step: int, observed: list[float], expected: float, tolerance: float) -> StepValue:
    """Return the verdict on a scalar that every rank reports in a step."""
    errors = [safe_ratio(abs(value - expected), abs(expected)) for value in observed]
    errors = [error if np.isfinite(error) else float("inf") for error in errors]
    worst = int(np.argmax(errors))
    ok = bool(np.isfinite(expected)) and errors[worst] <= tolerance
    return StepValue(step, expected, tuple(observed), errors[worst], worst, tolerance, ok)
