"""Find a known fault that explains a wrong step: a variant of the reference that computes exactly what the layout does.

A fault in a forward changes every value in a way of its own, so a variant that agrees with all gradients and the loss
of step 1 up to rounding is the cause. The change may affect all micro-batches or only those of one data-parallel rank
or of one number; a removed term may have another weight instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from meshwright.prove.compare.result import Diagnosis, FaultKind
from meshwright.prove.compare.tensor_shards import Array, max_magnitude
from meshwright.prove.compare.tensor_verdict import Verdicts, to_arrays
from meshwright.prove.diagnose.factors import NOTHING_FITS, LayoutCounts, close, factor_cause
from meshwright.prove.diagnose.fit_contributions import PROGRESS, simplified
from meshwright.prove.diagnose.phrases import number_words, rank_words
from meshwright.prove.placement import ExpertPlacement
from meshwright.prove.record.evidence import ReferenceEvidence, Variant

MAX_PLAIN_FACTOR = 16
"""Largest integer factor of a reported loss that is accepted without a known cause."""


@dataclass(frozen=True, eq=False)
class StepVector:
    """All gradients and losses of step 1 as vectors, each tensor divided by its scale."""

    verdicts: Verdicts
    observed_losses: Array
    """[rank]"""
    reference: ReferenceEvidence
    counts: LayoutCounts
    tolerance: float
    experts: ExpertPlacement | None = None

    def is_comparable(self) -> bool:
        """Return whether every tensor is complete and finite."""
        assemblies = [verdict.suspect.assembly for verdict in self.verdicts.values()]
        is_complete = bool(assemblies) and all(one.shards and not one.faults for one in assemblies)
        return is_complete and all(np.isfinite(shard.value).all() for one in assemblies for shard in one.shards)

    def observed(self) -> Array:
        """Return the layout's gradients on all ranks."""
        return self._joined(
            shard.value / self._scale(name)
            for name, verdict in self.verdicts.items()
            for shard in verdict.suspect.assembly.shards
        )

    def of(self, gradients: dict[str, Array]) -> Array:
        """Return the same elements of full gradients."""
        return self._joined(
            shard.slice_of(gradients[name]) / self._scale(name)
            for name, verdict in self.verdicts.items()
            for shard in verdict.suspect.assembly.shards
        )

    @staticmethod
    def _joined(parts: Iterable[Array]) -> Array:
        return np.concatenate([part.reshape(-1) for part in parts])

    def _scale(self, name: str) -> float:
        suspect = self.verdicts[name].suspect
        return max(suspect.scale, *(max_magnitude(shard.value) for shard in suspect.assembly.shards)) or 1.0

    def losses(self, loss: float) -> Array:
        """Return relative errors of the ranks' losses if `loss` were due."""
        return (self.observed_losses - loss) / abs(self.reference.losses[0])


@dataclass(frozen=True, eq=False)
class _Problem:
    """What is observed, and by how much the reference is off."""

    vector: StepVector
    observed: Array
    due: Array
    error: float

    def explains(self, gradients: Array, loss_errors: Array) -> bool:
        """Return whether values agree with the layout up to rounding, and explain its error."""
        error = max(max_magnitude(self.observed - gradients), max_magnitude(loss_errors))
        return error <= 10 * self.vector.tolerance and error <= PROGRESS * self.error


def diagnose_by_variants(vector: StepVector, variants: Iterator[Variant]) -> tuple[Diagnosis, ReferenceEvidence] | None:
    """Return the diagnosis of the first variant that explains step 1, and that variant's values."""
    if not vector.is_comparable():
        return None
    due = to_arrays(vector.reference.gradients)
    observed, expected = vector.observed(), vector.of(due)
    error = max(max_magnitude(observed - expected), max_magnitude(vector.losses(vector.reference.losses[0])))
    if not np.isfinite(error):
        return None
    problem = _Problem(vector, observed, expected, error)
    for variant in variants:
        found = _weighted_term(problem, variant) if variant.is_linear else _same_values(problem, variant)
        if found is not None:
            return found, variant.evidence
    return None


def _same_values(problem: _Problem, variant: Variant) -> Diagnosis | None:
    for where, change in _changes(problem.vector, variant):
        gradients = problem.vector.of(change.gradients)
        if problem.explains(gradients, problem.vector.losses(change.loss)):
            symptom = f"step 1 equals the reference with {variant.what}{where}"
            return Diagnosis(FaultKind.VARIANT, symptom, variant.cause)
    return None


@dataclass(frozen=True, eq=False)
class _Values:
    gradients: dict[str, Array]
    loss: float


def _changes(vector: StepVector, variant: Variant) -> Iterator[tuple[str, _Values]]:
    """Yield the places that a variant may apply to, and its values."""
    evidence, reference = variant.evidence, vector.reference
    yield "", _Values(to_arrays(evidence.gradients), evidence.losses[0])
    ours, theirs = reference.partial_losses, evidence.partial_losses
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return
    base, loss_change = to_arrays(reference.gradients), to_arrays({"": theirs - ours})[""]
    partial = {
        name: to_arrays({"": evidence.partial_gradients[name] - value})[""]
        for name, value in reference.partial_gradients.items()
    }
    for where, mask in _places(vector.counts, 1 if vector.experts is None else vector.experts.size):
        gradients = {name: value + np.tensordot(mask, partial[name], 2) for name, value in base.items()}
        yield where, _Values(gradients, reference.losses[0] + float((mask * loss_change).sum()))


def _places(counts: LayoutCounts, ep: int) -> Iterator[tuple[str, Array]]:
    """Yield subsets of the micro-batches as masks [data-parallel rank, micro-batch], with words."""
    grid = (counts.axes.data_parallel(), counts.num_microbatches)
    rank_d, number_m = np.arange(grid[0])[:, None], np.arange(grid[1])[None, :]
    if grid[0] > 1:
        for d in range(grid[0]):
            yield f" for the tokens of {_data_words(d, counts)}", np.broadcast_to(rank_d == d, grid)
    if 1 < ep < grid[0]:
        for at in range(ep):
            yield f" for the tokens of ep rank {at} in every group", np.broadcast_to(rank_d % ep == at, grid)
    if grid[1] > 1:
        yield from ((f" in micro-batch {m}", np.broadcast_to(number_m == m, grid)) for m in range(grid[1]))
    if min(grid) > 1:
        for d, m in itertools.product(range(grid[0]), range(grid[1])):
            yield f" in micro-batch {m} of {_data_words(d, counts)}", (rank_d == d) & (number_m == m)


def _data_words(dp_rank: int, counts: LayoutCounts) -> str:
    ranks = rank_words(r for r in range(counts.axes.num_ranks()) if counts.axes.data_index(r) == dp_rank)
    return f"data-parallel rank {dp_rank} ({ranks})"


def _weighted_term(problem: _Problem, variant: Variant) -> Diagnosis | None:
    """Diagnose a wrong weight of the term that a variant lacks."""
    vector, reference_loss = problem.vector, problem.vector.reference.losses[0]
    off = problem.observed - problem.due
    for where, change in _changes(vector, variant):
        term, loss_term = problem.due - vector.of(change.gradients), reference_loss - change.loss
        energy = float(term @ term)
        if not energy or not loss_term:
            continue
        in_gradient = simplified(1.0 + float(off @ term) / energy)
        ratios = 1.0 + vector.losses(reference_loss) * abs(reference_loss) / loss_term
        in_loss = simplified(float(ratios[0]))
        if not (in_loss == in_gradient or in_loss == 1.0 or _is_plain(in_loss, vector.counts)):
            continue
        gradients = problem.due + (in_gradient - 1.0) * term
        if problem.explains(gradients, vector.losses(reference_loss + (in_loss - 1.0) * loss_term)):
            return _weight_words(variant.what + where, in_gradient, in_loss, vector)
    return None


def _is_plain(factor: float, counts: LayoutCounts) -> bool:
    """Return whether a factor is likely a fault's: any loss is some multiple of a term."""
    whole = factor == round(factor) and abs(factor) <= MAX_PLAIN_FACTOR
    return whole or bool(factor_cause(factor, counts))


def _weight_words(what: str, in_gradient: float, in_loss: float, vector: StepVector) -> Diagnosis:
    factor = in_loss if in_gradient == 1.0 else in_gradient
    where = ""
    if in_gradient == 1.0:
        where = " in the reported loss, and its gradient is right"
    elif in_loss == 1.0:
        where = " in the gradient, and the reported loss is right"
    elif not close(in_loss, in_gradient):
        where = f" in the gradient, and {number_words(in_loss)} × in the reported loss"
    if factor == 0.0:
        return Diagnosis(FaultKind.VARIANT, f"{what} is missing{where}", "its scale is 0, or it is not added there")
    ep = 1 if vector.experts is None else vector.experts.size
    known = factor_cause(factor, vector.counts, max_rarity=2)
    causes = [known] if known else []
    if ep > 1 and close(factor, ep):
        causes.append(f"multiplied by ep ({ep} ranks), whose ranks have different tokens")
    elif ep > 1 and close(factor, 1.0 / ep):
        causes.append(f"divided by ep ({ep} ranks), whose ranks have different tokens")
    cause = ", or ".join(causes) or factor_cause(factor, vector.counts) or NOTHING_FITS
    return Diagnosis(FaultKind.VARIANT, f"{what} has {number_words(factor)} × its weight{where}", cause)


def diagnose_later(vector: StepVector, norms: Array, losses: Array, variants: Iterator[Variant]) -> Diagnosis | None:
    """Return the diagnosis of the first variant that explains the steps after the first.

    Args:
        vector: parameters after the last step, in the place of gradients.
        norms: gradient norms [step, rank].
        losses: losses [step, rank].
        variants: variants that are right in step 1, computed for all steps.
    """
    if not vector.is_comparable():
        return None
    reference = vector.reference
    observed, due = vector.observed(), vector.of(to_arrays(reference.parameters))

    def series_error(evidence: ReferenceEvidence) -> float:
        pairs = ((losses, evidence.losses), (norms, evidence.grad_norms))
        return max(max_magnitude(found / np.array(expected)[:, None] - 1.0) for found, expected in pairs)

    error = max(max_magnitude(observed - due), series_error(reference))
    for variant in variants:
        left = max_magnitude(observed - vector.of(to_arrays(variant.evidence.parameters)))
        left = max(left, series_error(variant.evidence))
        if left <= vector.tolerance and left <= PROGRESS * error:
            symptom = f"all steps equal the reference with {variant.what}"
            return Diagnosis(FaultKind.VARIANT, symptom, variant.cause)
    return None
