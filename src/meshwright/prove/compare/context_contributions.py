"""Diagnose gradients and losses again by the contributions of each context-parallel rank's tokens.

These take a second forward and backward of the reference, so they are computed only for values whose fault is not
recognised as one of whole samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import numpy as np

from meshwright.prove.compare.result import SeriesResult
from meshwright.prove.compare.tensor_shards import Array, max_magnitude
from meshwright.prove.compare.tensor_verdict import Verdicts, to_arrays
from meshwright.prove.diagnose.factors import LayoutCounts
from meshwright.prove.diagnose.gradients import DiagnosisContext, diagnose_gradient
from meshwright.prove.diagnose.losses import diagnose_loss
from meshwright.prove.diagnose.suspect import UNKNOWN
from meshwright.prove.record.evidence import ContextEvidence

SUM_TOLERANCE = 1e-11
"""Largest relative error of a sum of contributions; those of a weight that is not used token by token are far off."""


class ContextContributions:
    """Contributions of the tokens of context-parallel ranks, computed when first needed."""

    def __init__(self, compute: Callable[[], ContextEvidence], counts: LayoutCounts) -> None:
        self._compute, self._counts = compute, replace(counts, by_context=True)

    @cached_property
    def _evidence(self) -> ContextEvidence:
        return self._compute()

    @cached_property
    def _gradients(self) -> dict[str, Array]:
        return to_arrays(self._evidence.partial_gradients)

    def diagnose_gradients(self, verdicts: Verdicts, context: DiagnosisContext) -> Verdicts:
        """Replace the diagnoses of gradients that are not recognised, where the contributions explain them."""
        result = dict(verdicts)
        for name, verdict in verdicts.items():
            if verdict.result.diagnosis is None or verdict.result.diagnosis.kind not in UNKNOWN:
                continue
            parts, suspect = self._gradients.get(name), verdict.suspect
            if parts is None or not _sums_to(parts, suspect.expected):
                continue
            found = diagnose_gradient(replace(suspect, counts=self._counts, contributions=parts), context)
            if found.kind not in UNKNOWN:
                result[name] = verdict.with_diagnosis(found)
        return result

    def diagnose_loss(self, losses: SeriesResult) -> SeriesResult:
        """Replace the diagnosis of a loss of step 1 that is not recognised, where the contributions explain it."""
        if losses.diagnosis is None or losses.diagnosis.kind not in UNKNOWN or losses.steps[0].ok:
            return losses
        parts = to_arrays({"": self._evidence.partial_losses})[""]
        if not _sums_to(parts, np.array(losses.steps[0].expected)):
            return losses
        found = diagnose_loss(losses.steps[0], parts, self._counts, root_fault="")
        return losses if found.kind in UNKNOWN else replace(losses, diagnosis=found)


def _sums_to(parts: Array, expected: Array) -> bool:
    return max_magnitude(parts.sum((0, 1)) - expected) <= SUM_TOLERANCE * max_magnitude(parts)
