"""Record which samples a rank asks for, and what they are.

The content of a sample is recorded when the model reads it, as digests of its parts: two samples with the same digests
are the same, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from meshwright.models.contract.task import Batch, Reference, ShowsSamples, Task
from meshwright.nn.attention.mask_spec import TokenLayout
from meshwright.prove.record.evidence import Contents

DOCUMENTS = "documents"
NUMBERS = "numbers for dropout"


class RecordingTask(Task):
    """Task wrapper that records the indices of requested samples, and digests of what was read of them."""

    def __init__(self, task: Task, condition_names: Sequence[str] = ()) -> None:
        self._task, self._condition_names = task, condition_names
        self.unit, self.units_per_sample = task.unit, task.units_per_sample
        self.read: list[int] = []
        self.contents: Contents = {}

    def batch(self, samples: range) -> Batch:
        """Return the wrapped task's batch and record its samples."""
        self.read.extend(samples)
        contents = self.contents

        def record(part: str, rows: Iterable[str]) -> None:
            for sample, digest in zip(samples, rows, strict=False):
                contents.setdefault(sample, {}).setdefault(part, digest)

        return _RecordedBatch(self._task.batch(samples), record, self._condition_names)

    def count(self, samples: range) -> int:
        """Delegate to the wrapped task."""
        return self._task.count(samples)

    def loss_sum(self, out: Tensor, targets: Tensor) -> Tensor:
        """Delegate to the wrapped task."""
        return self._task.loss_sum(out, targets)

    def validation(self, *, batch_size: int, data_parallel: int, data_index: int) -> list[Batch]:
        """Delegate to the wrapped task."""
        return self._task.validation(batch_size=batch_size, data_parallel=data_parallel, data_index=data_index)

    def validation_sums(self, out: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Delegate to the wrapped task."""
        return self._task.validation_sums(out, targets)


class _RecordedBatch:
    """A batch whose parts are recorded when they are read."""

    def __init__(
        self, batch: Batch, record: Callable[[str, Iterable[str]], None], condition_names: Sequence[str]
    ) -> None:
        self._batch, self._record, self._condition_names = batch, record, condition_names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    @property
    def inputs(self) -> Tensor:
        """Inputs of the first stage."""
        inputs = self._batch.inputs
        self._record("inputs", digests(inputs))
        return inputs

    @property
    def targets(self) -> Tensor:
        """Targets for the last stage's output."""
        targets = self._batch.targets
        self._record("targets", digests(targets))
        return targets

    @property
    def conditions(self) -> tuple[Any, ...]:
        """Additional inputs of every stage."""
        conditions = self._batch.conditions
        for part, rows in condition_digests(conditions, self._condition_names).items():
            self._record(part, rows)
        return conditions


def digests(rows: Tensor) -> list[str]:
    """Return a digest of each row of a tensor: its values, dtype and shape."""
    return [_digest(row.detach().cpu().contiguous()) for row in rows]


def _digest(row: Tensor) -> str:
    kind = f"{row.dtype} {list(row.shape)} ".encode()
    values = row.reshape(-1).view(torch.uint8).numpy()  # NumPy has no bfloat16
    return blake2b(kind + values.tobytes(), digest_size=8).hexdigest()


def sample_digests(sample: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of a sample's parts, as the reference shows them."""
    return {
        part: digests(value[None])[0] if isinstance(value, Tensor) else str(value) for part, value in sample.items()
    }


def sample_contents(reference: Reference, num_samples: int, *, with_floats: bool = True) -> Contents:
    """Return the digests of a reference's first samples; empty if it doesn't show them."""
    if not isinstance(reference, ShowsSamples):
        return {}
    found = {}
    for index in range(num_samples):
        parts = reference.sample(index).items()
        kept = {n: x for n, x in parts if with_floats or not (isinstance(x, Tensor) and x.is_floating_point())}
        found[index] = sample_digests(kept)
    return found


def condition_digests(conditions: Sequence[Any], names: Sequence[str] = ()) -> Mapping[str, list[str]]:
    """Return digests of the rows of each condition: tensors by their names, and of the placement of tokens, the
    documents and the numbers of the samples."""
    found: dict[str, list[str]] = {}
    for at, one in enumerate(conditions):
        if isinstance(one, Tensor):
            found[names[at] if at < len(names) else f"condition {at + 1}"] = digests(one)
        elif isinstance(one, TokenLayout):
            found |= {DOCUMENTS: [str(lengths) for lengths in one.documents]} if one.documents is not None else {}
            found |= {NUMBERS: [str(sample) for sample in one.samples]} if one.samples is not None else {}
    return found
