"""Losses and norms as the ranks of a script report them: of the global batch, or each of its own samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from meshwright.prove.compare.result import SeriesResult, StepValue
from meshwright.prove.compare.tensor_shards import safe_ratio
from meshwright.prove.script.evidence import ScriptEvidence


def reported(evidence: ScriptEvidence, name: str) -> list[float]:
    """Return the loss or norm of each step, averaged over the ranks that report one; NaN without any."""
    by_rank = _by_rank(evidence, name)
    return [_mean(column) for column in zip(*by_rank, strict=True)]


def compare_reported(
    layout: ScriptEvidence, reference: ScriptEvidence, name: str, tolerances: Sequence[float]
) -> SeriesResult:
    """Return the verdict on each step, without a diagnosis.

    Ranks may report a loss of their own samples, if the mean over ranks is right; a norm has to be the global one.
    """
    steps = []
    columns = list(zip(*_by_rank(layout, name), strict=True))
    for at, expected in enumerate(reported(reference, name)):
        mean, tolerance = _mean(columns[at]), tolerances[at]
        found = tuple(mean if math.isnan(value) else value for value in columns[at])
        errors = [_error(value, expected) for value in found]
        worst = int(np.argmax(errors))
        is_mean = name == "losses" and _error(mean, expected) <= tolerance
        ok = is_mean or errors[worst] <= tolerance
        steps.append(StepValue(at + 1, expected, found, errors[worst], worst, tolerance, ok))
    return SeriesResult(tuple(steps))


def _by_rank(evidence: ScriptEvidence, name: str) -> list[list[float]]:
    """Return one value per rank and step: the mean of those reported, NaN for none."""
    return [[_mean(values) for values in getattr(record, name)] for record in evidence.records]


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _error(value: float, expected: float) -> float:
    off = safe_ratio(abs(value - expected), abs(expected))
    return off if math.isfinite(off) else math.inf
