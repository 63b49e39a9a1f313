"""Verdicts on tensors: the largest deviation of any shard from the reference, checked against a tolerance.

The relative error of a tensor is its largest deviation divided by its scale, the largest magnitude in the reference
tensor. If the reference is zero or rounding noise (below `NOISE` times the largest magnitude of all tensors), like the
gradient of a key bias under softmax, the scale is the largest magnitude of all tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from meshwright.prove.compare.assemble_shards import assemble
from meshwright.prove.compare.result import Diagnosis, TensorResult
from meshwright.prove.compare.tensor_shards import MISSING, Array, max_magnitude, measure_deviation, safe_ratio
from meshwright.prove.diagnose.factors import LayoutCounts
from meshwright.prove.diagnose.suspect import SuspectTensor
from meshwright.prove.record.evidence import RecordedShard

NOISE = 1e-14
"""Relative magnitude below which a reference tensor counts as noise: sums that cancel leave about 1e-16 of their terms,
and a true gradient this small has no effect."""


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


def to_arrays(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    """Convert tensors to float64 NumPy arrays."""
    return {
        name: np.asarray(value.detach().double().cpu().numpy(), dtype=np.float64) for name, value in tensors.items()
    }


def compare_tensors(
    shards: Mapping[str, list[RecordedShard]],
    references: Mapping[str, Array],
    counts: LayoutCounts,
    tolerance: float | Mapping[str, float],
    contributions: Mapping[str, Array] | None = None,
) -> Verdicts:
    """Compare the shards with all reference tensors of one kind, such as gradients.

    Args:
        tolerance: relative tolerance, of all tensors or of each.
    """
    scales = tensor_scales(references)
    suspects = {
        name: SuspectTensor(
            assemble(name, shards.get(name, []), expected.shape, counts.axes),
            expected,
            scales[name],
            tolerance if isinstance(tolerance, float) else tolerance[name],
            counts,
            (contributions or {}).get(name),
        )
        for name, expected in references.items()
    }
    return {name: TensorVerdict(_verdict(suspect), suspect) for name, suspect in suspects.items()}


def _verdict(suspect: SuspectTensor) -> TensorResult:
    assembly = suspect.assembly
    is_complete = bool(assembly.shards or not suspect.expected.size) and not assembly.faults
    is_comparable = is_complete and bool(np.isfinite(suspect.expected).all())
    error = measure_deviation(assembly, suspect.expected, suspect.scale) if is_comparable else MISSING
    replica_difference = assembly.mismatches[0].largest if assembly.mismatches else 0.0
    return TensorResult(
        error=error,
        tolerance=suspect.tolerance,
        ok=is_comparable and error.relative <= suspect.tolerance,
        replicated=assembly.replicated,
        num_replicas=assembly.num_replicas(),
        replicas_equal=not assembly.mismatches,
        replicas_agree=safe_ratio(replica_difference, suspect.scale) <= 2 * suspect.tolerance,
        max_replica_difference=replica_difference,
    )


def tensor_scales(references: Mapping[str, Array]) -> dict[str, float]:
    """Return the scale of each tensor, by which errors are divided."""
    magnitudes = {name: max_magnitude(expected) for name, expected in references.items()}
    overall = max((scale for scale in magnitudes.values() if np.isfinite(scale)), default=0.0)
    return {name: scale if scale > NOISE * overall else overall for name, scale in magnitudes.items()}
