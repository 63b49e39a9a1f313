"""How much rounding may change what a script computes, which depends on its dtype and its model; comparing by it.

The reference runs again with every weight changed by up to one rounding unit of its dtype. What that changes is what
rounding may change (as in TTrace, arXiv 2506.09280), so a layout may deviate by `MULTIPLE` times as much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import torch

from meshwright.errors import InputError
from meshwright.prove.judge.counts import LayoutCounts
from meshwright.prove.judge.verdicts import Verdicts, compare_step, compare_tensors, tensor_scales
from meshwright.prove.record.evidence import RecordedShard
from meshwright.prove.result import StepValue
from meshwright.prove.script.evidence import GRADIENT, INITIAL, Kind, ScriptEvidence

MULTIPLE = 8
"""Times the measured deviation that a layout may deviate."""
FLOOR = 8
"""Rounding units that any tensor may deviate, relative to its largest element."""
NOISE = 4
"""Times its measured deviation below which an element of a gradient is of rounding size."""
FLOAT64 = {"initial": 1e-12, "gradient": 1e-12, "update": 1e-9}
"""Smallest tolerances in float64, those of `meshwright prove`."""
SERIES = {"loss": "loss", "norm": "grad_norm"}
"""Names in reports and in records of what is reported in each step."""
Tolerances = Mapping[Kind, Mapping[str, float]]


@dataclass(frozen=True)
class ScriptTolerances:
    """Relative tolerances of all compared values."""

    tensors: Tolerances
    """By kind and name."""
    series: Mapping[str, tuple[float, ...]]
    """Of losses and norms: one per step."""
    note: str
    """What the tolerances are, and why."""

    def usual(self, kind: Kind) -> float:
        """Return the median tolerance of one kind of tensor."""
        return median(self.tensors[kind].values()) if self.tensors[kind] else 0.0


def measure_tolerances(reference: ScriptEvidence, perturbed: Sequence[ScriptEvidence]) -> ScriptTolerances:
    """Return tolerances from runs of the reference whose initial weights were changed by one rounding unit.

    Raises:
        InputError: the runs differ by more than rounding, so the script is not deterministic.
    """
    errors = {kind: [_errors(reference, other, kind) for other in perturbed] for kind in reference.kinds}
    for other, gradients in zip(perturbed, errors[GRADIENT], strict=True):
        _check_deterministic(reference, other, gradients)
    floor, tensors = FLOOR * reference.unit, dict[Kind, dict[str, float]]()
    for kind, found in errors.items():
        least = FLOOR * reference.eps if kind == INITIAL else floor
        least = max(least, FLOAT64[kind[0]]) if reference.unit == np.finfo(np.float64).eps else least
        worst = {name: max((one[name] for one in found), default=0.0) for name in reference.fulls(kind)}
        usual = median(worst.values()) if worst else 0.0
        tensors[kind] = {name: max(least, MULTIPLE * max(value, usual)) for name, value in worst.items()}
    series = {}
    for name in SERIES:
        runs = [compare_reported(other, reference, name, (math.inf,) * reference.num_steps) for other in perturbed]
        worst_of = [max((run[at].relative_error for run in runs), default=0.0) for at in range(reference.num_steps)]
        series[name] = tuple(max(floor, MULTIPLE * _finite(error)) for error in worst_of)
    limits = tensors[GRADIENT].values()
    note = (
        f"tolerances for {reference.dtypes}: {MULTIPLE} × what one rounding unit in every weight changes in the "
        f"reference; gradients {min(limits):.0e} to {max(limits):.0e}, "
        f"parameters after the last step up to {max(tensors[reference.kinds[-1]].values()):.0e}"
    )
    return ScriptTolerances(tensors, series, note)


def _errors(reference: ScriptEvidence, other: ScriptEvidence, kind: Kind) -> dict[str, float]:
    """Return the error of each tensor of a further run; 0 of one that is not finite, which is no rounding."""
    verdicts, _ = compare_kind(other, reference, kind, LayoutCounts(other.axes, 1, 1))
    return {name: _finite(one.result.error.relative) for name, one in verdicts.items()}


def _finite(error: float) -> float:
    return error if math.isfinite(error) else 0.0


def compare_kind(
    layout: ScriptEvidence,
    reference: ScriptEvidence,
    kind: Kind,
    counts: LayoutCounts,
    tolerances: ScriptTolerances | None = None,
) -> tuple[Verdicts, int]:
    """Compare all tensors of one kind, but for parameters that the layout lacks or shapes otherwise.

    Args:
        tolerances: tolerances; None if errors are to be measured.

    Returns:
        Verdicts, and how many elements are not compared because rounding decides how the step changes them.
    """
    expected = {name: full for name, full in reference.fulls(kind).items() if layout.shapes.get(name) == full.shape}
    shards, num_skipped = layout.shards(kind), 0
    if kind[0] == "update":
        masks = _noisy_elements(reference, {} if tolerances is None else tolerances.tensors[GRADIENT])
        masks = {name: mask for name, mask in masks.items() if name in expected and mask.any()}
        num_skipped = sum(int(mask.sum()) for mask in masks.values())
        shards |= {name: _without(mask, shards.get(name, []), expected[name]) for name, mask in masks.items()}
    if tolerances is None:
        return compare_tensors(shards, expected, counts, math.inf), num_skipped
    limits = {name: tolerances.tensors[kind].get(name, tolerances.usual(kind)) for name in expected}
    return compare_tensors(shards, expected, counts, limits, step=kind[1]), num_skipped


def _noisy_elements(reference: ScriptEvidence, tolerances: Mapping[str, float]) -> dict[str, np.ndarray]:
    """Return a mask per parameter of the elements whose gradient in step 1 is of rounding size, but not zero.

    Adam divides a gradient by its own magnitude, so that the sign of such an element, which rounding decides, moves the
    weight by a whole learning rate.
    """
    gradients, found = reference.fulls(GRADIENT), {}
    for name, scale in tensor_scales(gradients).items():
        limit = scale * max(tolerances.get(name, 0.0) * NOISE / MULTIPLE, FLOOR * reference.unit)
        found[name] = (np.abs(gradients[name]) <= limit) & (gradients[name] != 0.0)
    return found


def _without(mask: np.ndarray, shards: list[RecordedShard], expected: np.ndarray) -> list[RecordedShard]:
    """Return shards whose masked elements are the expected ones; one out of bounds stays as it is."""
    found = []
    for shard in shards:
        at = tuple(slice(start, start + size) for start, size in zip(shard.offset, shard.value.shape, strict=True))
        if mask[at].shape == tuple(shard.value.shape):
            value = torch.where(torch.from_numpy(mask[at]), torch.from_numpy(expected[at]), shard.value.double())
            shard = replace(shard, value=value)
        found.append(shard)
    return found


def compare_reported(
    layout: ScriptEvidence, reference: ScriptEvidence, name: str, tolerances: Sequence[float]
) -> tuple[StepValue, ...]:
    """Return the verdict on the losses or norms of each step, without a diagnosis.

    Ranks may report a loss of their own samples, if the mean over ranks is right; a norm has to be the global one.
    """
    found = []
    for step, tolerance in enumerate(tolerances, start=1):
        expected, mean = (one.mean(SERIES[name], step) for one in (reference, layout))
        observed = [mean if value is None else value for value in layout.reported(SERIES[name], step)]
        value = compare_step(step, observed, expected, tolerance)
        is_mean = name == "loss" and compare_step(step, [mean], expected, tolerance).ok
        found.append(replace(value, ok=value.ok or is_mean))
    return tuple(found)


def _check_deterministic(reference: ScriptEvidence, other: ScriptEvidence, gradients: Mapping[str, float]) -> None:
    differing, starts = "", other.fulls(INITIAL)
    # Gradients that cancel, such as those of a key bias under softmax, consist of rounding.
    sizes = tensor_scales(reference.fulls(GRADIENT))
    limit = max(float(np.sqrt(reference.unit)), 64 * reference.unit)
    odd = [name for name, off in gradients.items() if off > limit and sizes[name] > 0.01 * max(sizes.values())]
    if any(
        reference.series("samples", step) != other.series("samples", step) for step in range(1, reference.num_steps + 1)
    ):
        differing = "read different samples"
    elif any(
        not np.array_equal(value, starts.get(name, np.empty(0))) for name, value in reference.fulls(INITIAL).items()
    ):
        differing = "start from different weights"
    elif odd:
        differing = f"have different gradients in step 1, by {max(gradients.values()):.0e} relative ({odd[0]})"
    if differing:
        raise InputError(
            f"{reference.run.script.name} is not deterministic: two runs on {reference.run.layout} {differing}",
            where=f"{reference.run.script}, {reference.run.layout}",
            rule="a proof compares runs, so a run must repeat up to rounding",
            fix="seed everything: torch.manual_seed for weights and dropout, a generator or sampler seed for the data; "
            "and set dropout to 0, whose masks depend on the layout",
        )
