"""Verdicts on tensors: how far every rank's piece is from the reference, and whether that is within tolerance.

The error of a tensor is the largest deviation of any rank's piece, over the largest magnitude in the reference's
tensor (its scale). A tensor of which the reference holds nothing but rounding (below `NOISE` of the largest of all,
exact zero included: a key's bias under softmax has no other gradient) has no scale of its own, and is measured
against the largest of all tensors of its sort.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from meshwright.prove.compare.assemble_shards import assemble
from meshwright.prove.compare.result import Diagnosis, TensorResult
from meshwright.prove.compare.tensor_shards import MISSING, Array, largest, measure, over
from meshwright.prove.diagnose.factors import Counts
from meshwright.prove.diagnose.suspect import Subject
from meshwright.prove.record.evidence import Shard

NOISE = 1e-14
"""Sums of cancelling terms leave about 1e-16 of the terms; a real gradient this small moves nothing."""


@dataclass(frozen=True, eq=False)
class Weighed:
    """A tensor's verdict, and what a diagnosis needs if it is wrong."""

    result: TensorResult
    subject: Subject

    def diagnosed(self, diagnosis: Diagnosis) -> Weighed:
        """The same with a cause."""
        return replace(self, result=replace(self.result, diagnosis=diagnosis))


ByName = dict[str, Weighed]


def any_wrong(weighed: ByName) -> bool:
    """Whether one of them is out of tolerance."""
    return not all(one.result.ok for one in weighed.values())


def to_arrays(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    """Tensors as float64 arrays."""
    return {
        name: np.asarray(value.detach().double().cpu().numpy(), dtype=np.float64) for name, value in tensors.items()
    }


def weigh_all(
    shards: Mapping[str, list[Shard]],
    dues: Mapping[str, Array],
    counts: Counts,
    tolerance: float,
    parts: Mapping[str, Array] | None = None,
) -> ByName:
    """The verdict on every tensor of one sort that the reference has."""
    scales = _scales(dues)
    subjects = {
        name: Subject(
            assemble(name, shards.get(name, []), due.shape, counts.axes),
            due,
            scales[name],
            tolerance,
            counts,
            (parts or {}).get(name),
        )
        for name, due in dues.items()
    }
    return {name: Weighed(_verdict(subject), subject) for name, subject in subjects.items()}


def _verdict(subject: Subject) -> TensorResult:
    assembly = subject.assembly
    whole = bool(assembly.pieces or not subject.due.size) and not assembly.faults
    sound = whole and bool(np.isfinite(subject.due).all())
    error = measure(assembly, subject.due, subject.scale) if sound else MISSING
    gap = assembly.gaps[0].largest if assembly.gaps else 0.0
    return TensorResult(
        error=error,
        tolerance=subject.tolerance,
        ok=sound and error.relative <= subject.tolerance,
        replicated=assembly.replicated,
        num_copies=assembly.num_copies(),
        copies_equal=not assembly.gaps,
        copies_agree=over(gap, subject.scale) <= 2 * subject.tolerance,
        copy_difference=gap,
    )


def _scales(dues: Mapping[str, Array]) -> dict[str, float]:
    own = {name: largest(due) for name, due in dues.items()}
    most = max((scale for scale in own.values() if np.isfinite(scale)), default=0.0)
    return {name: scale if scale > NOISE * most else most for name, scale in own.items()}
