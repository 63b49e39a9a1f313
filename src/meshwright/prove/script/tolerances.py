"""Losses and norms as the ranks of a script report them, and tolerances: measured, since rounding depends on the
script's dtype and on its model.

The reference runs again with every weight changed by up to one rounding unit of its dtype. What that changes is what
rounding may change (as in TTrace, arXiv 2506.09280), so a layout may deviate by `MULTIPLE` times as much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from meshwright.errors import InputError
from meshwright.prove.compare.result import SeriesResult, StepValue
from meshwright.prove.compare.tensor_shards import max_difference, safe_ratio
from meshwright.prove.compare.tensor_verdict import tensor_scales
from meshwright.prove.script.evidence import KINDS, ScriptEvidence

MULTIPLE = 8
"""Times the measured deviation that a layout may deviate."""
FLOOR = 8
"""Rounding units that any tensor may deviate, relative to its largest element."""
NOISE = 4
"""Times its measured deviation below which an element of a gradient is of rounding size."""
FLOAT64 = {"initial": 1e-12, "gradients": 1e-12, "after_first": 1e-9, "parameters": 1e-9}
"""Smallest tolerances in float64, those of `meshwright prove`."""


@dataclass(frozen=True)
class ScriptTolerances:
    """Relative tolerances of all compared values."""

    tensors: Mapping[str, Mapping[str, float]]
    """[kind][name]"""
    losses: tuple[float, ...]
    """[step]"""
    norms: tuple[float, ...]
    note: str
    """What the tolerances are, and why."""

    def usual(self, kind: str) -> float:
        """Return the median tolerance of one kind of tensor."""
        return median(self.tensors[kind].values()) if self.tensors[kind] else 0.0


def measure_tolerances(reference: ScriptEvidence, perturbed: Sequence[ScriptEvidence]) -> ScriptTolerances:
    """Return tolerances from runs of the reference whose initial weights were changed by one rounding unit.

    Raises:
        InputError: the runs differ by more than rounding, so the script is not deterministic.
    """
    for other in perturbed:
        _check_deterministic(reference, other)
    floor, is_float64 = FLOOR * reference.unit, reference.unit == np.finfo(np.float64).eps
    tensors = {}
    for kind in KINDS:
        least = FLOOR * reference.eps if kind == "initial" else floor
        least = max(least, FLOAT64[kind]) if is_float64 else least
        measured = (
            _deviations(reference, perturbed, kind) if kind != "initial" else dict.fromkeys(reference.shapes, 0.0)
        )
        usual = median(measured.values()) if measured else 0.0
        tensors[kind] = {name: max(least, MULTIPLE * max(value, usual)) for name, value in measured.items()}
    losses, norms = (_series(reference, perturbed, name, floor) for name in ("losses", "norms"))
    gradients = tensors["gradients"].values()
    note = (
        f"tolerances for {reference.dtypes}: {MULTIPLE} × what one rounding unit in every weight changes in the "
        f"reference; gradients {min(gradients):.0e} to {max(gradients):.0e}, "
        f"parameters after the last step up to {max(tensors['parameters'].values()):.0e}"
    )
    return ScriptTolerances(tensors, losses, norms, note)


def _deviations(reference: ScriptEvidence, perturbed: Sequence[ScriptEvidence], kind: str) -> dict[str, float]:
    expected = reference.fulls(kind)
    scales = tensor_scales(expected)
    skipped = noisy_elements(reference, {}) if kind in ("after_first", "parameters") else {}
    worst = dict.fromkeys(expected, 0.0)
    for other in perturbed:
        for name, value in other.fulls(kind).items():
            if name in expected and value.shape == expected[name].shape and value.size:
                value = np.where(skipped[name], expected[name], value) if name in skipped else value
                off = safe_ratio(max_difference(value, expected[name])[0], scales[name])
                worst[name] = max(worst[name], off)
    return worst


def noisy_elements(reference: ScriptEvidence, tolerances: Mapping[str, float]) -> dict[str, np.ndarray]:
    """Return a mask per parameter of the elements whose gradient in step 1 is of rounding size, but not zero.

    Adam divides a gradient by its own magnitude, so that the sign of such an element, which rounding decides, moves the
    weight by a whole learning rate.
    """
    gradients = reference.fulls("gradients")
    scales = tensor_scales(gradients)
    found = {}
    for name, value in gradients.items():
        limit = scales[name] * max(tolerances.get(name, 0.0) * NOISE / MULTIPLE, FLOOR * reference.unit)
        found[name] = (np.abs(value) <= limit) & (value != 0.0)
    return found


def _series(
    reference: ScriptEvidence, perturbed: Sequence[ScriptEvidence], name: str, floor: float
) -> tuple[float, ...]:
    expected, found = reported(reference, name), []
    for step, value in enumerate(expected):
        others = [reported(other, name)[step] for other in perturbed]
        off = max((safe_ratio(abs(other - value), abs(value)) for other in others), default=0.0)
        found.append(max(floor, MULTIPLE * off) if np.isfinite(off) else floor)
    return tuple(found)


def _check_deterministic(reference: ScriptEvidence, other: ScriptEvidence) -> None:
    differing = ""
    if [record.samples for record in reference.records] != [record.samples for record in other.records]:
        differing = "read different samples"
    elif any(
        not np.array_equal(value, other.fulls("initial")[name]) for name, value in reference.fulls("initial").items()
    ):
        differing = "start from different weights"
    else:
        limit = max(float(np.sqrt(reference.unit)), 64 * reference.unit)
        deviations = _deviations(reference, [other], "gradients")
        sizes = tensor_scales(reference.fulls("gradients"))
        # Gradients that cancel, such as those of a key bias under softmax, consist of rounding.
        odd = [name for name, off in deviations.items() if off > limit and sizes[name] > 0.01 * max(sizes.values())]
        if odd:
            differing = f"have different gradients in step 1, by {max(deviations.values()):.0e} relative ({odd[0]})"
    if differing:
        raise InputError(
            f"{reference.run.script.name} is not deterministic: two runs on {reference.run.layout} {differing}",
            where=f"{reference.run.script}, {reference.run.layout}",
            rule="a proof compares runs, so a run must repeat up to rounding",
            fix="seed everything: torch.manual_seed for weights and dropout, a generator or sampler seed for the data; "
            "and set dropout to 0, whose masks depend on the layout",
        )


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
