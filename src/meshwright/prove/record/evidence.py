"""Evidence of a proof: values that the ranks of a layout recorded, step by step, and the samples that they read.

Ranks record local shards without using collectives, so a faulty collective cannot mask its own error. A sample is
recorded when the model reads it, as digests of its parts: two samples with the same digests are the same, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.mesh.axes import Axes
from meshwright.mesh.local_shards import local_box, to_local
from meshwright.models.contract.task import Batch, Reference, ShowsSamples, Task
from meshwright.nn.attention.mask_spec import TokenLayout
from meshwright.prove.placement import ExpertPlacement, StagePlacement

DTYPE = torch.float64
"""Dtype of both sides of an exact proof."""
Contents = dict[int, dict[str, str]]
"""Digests by sample and by part of it, such as `inputs` and `targets`."""
ShardsByName = dict[str, tuple[tuple[int, ...], Tensor]]
"""Per parameter: offset and value of the local shard."""
DropoutCall = tuple[str, int, int, list[int]]
"""A call of a dropout: its name, hashes of its inputs and of its output, and the numbers of the tokens."""


def local_shards(tensors: Mapping[str, Tensor]) -> ShardsByName:
    """Return copies of this rank's shards on the CPU, and their offsets."""
    return {
        name: (local_box(tensor).offset, to_local(tensor.detach()).cpu().clone()) for name, tensor in tensors.items()
    }


@dataclass(frozen=True)
class RecordedShard:
    """Local shard of a tensor, as recorded by one rank."""

    rank: int
    offset: tuple[int, ...]
    """Start index of the shard in the full tensor, per dim."""
    value: Tensor
    """Local values; may be empty if the sharded dim is smaller than the number of ranks."""


Shards = dict[str, list[RecordedShard]]


@dataclass
class StepRecord:
    """Values of one step on a rank."""

    loss: float
    """Mean loss of the global batch, as the rank reports it."""
    grad_norm: float
    """Global gradient norm before clipping, as the rank reports it."""
    lr: float
    """Learning rate that the optimizer was given; NaN if it took no step."""
    skipped: bool
    samples: list[int]
    """Indices of the samples that the rank processed, in micro-batch order."""
    contents: Contents
    """Digests of what each sample was, see `RecordingTask`."""
    gradients: ShardsByName
    """Shards of the gradients, before clipping."""
    given: ShardsByName
    """Shards of the gradients that the optimizer was given; empty if it took no step."""
    weights: ShardsByName
    """Shards of parameters and saved buffers after the step."""
    features: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """State of features after the backward, by the feature's name."""


@dataclass
class RankRecord:
    """Values recorded by one rank; only numbers and tensors, for `torch.load` with `weights_only=True`."""

    initial: ShardsByName = field(default_factory=dict)
    """Shards of parameters and saved buffers before the first step."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Fields of a `StepRecord` of each step."""
    unequal: list[tuple[str, int, int, str, float]] = field(default_factory=list)
    """Fields of `UnequalCopies` except the rank: name, both stages, kind of value, largest difference."""
    dropouts: list[DropoutCall] = field(default_factory=list)
    """Calls of dropouts in step 1; only in proofs as run."""
    nonfinite: dict[str, list[str]] = field(default_factory=dict)
    """What changed in steps that must be skipped, by what was not finite in them, see `try_nonfinite_steps`."""
    loss_unit: str = ""
    """Name of the unit of losses."""

    def step(self, step: int) -> StepRecord:
        """Return the record of a step, from 1."""
        return StepRecord(**self.steps[step - 1])


INITIAL = "initial weight"


@dataclass(frozen=True)
class UnequalCopies:
    """Two copies of a shared parameter on one rank that are not bitwise equal."""

    rank: int
    name: str
    stages: tuple[int, int]
    what: str
    """Kind of value: `initial weight`, `gradient of step 1` or `parameter after the last step`."""
    largest: float
    """Largest absolute difference."""


@dataclass(frozen=True)
class Evidence:
    """The records of all ranks of a layout."""

    axes: Axes
    num_microbatches: int
    ranks: tuple[RankRecord, ...]
    stages: StagePlacement | None = None
    """Stage placement of a pipeline."""
    experts: ExpertPlacement | None = None
    """Placement of experts; None for a model without any."""

    @property
    def num_steps(self) -> int:
        """Number of steps that all ranks recorded."""
        return min((len(record.steps) for record in self.ranks), default=0)

    def weights(self, step: int) -> Shards:
        """Return the shards of parameters and saved buffers after a step; 0 is before the first."""
        return self._shards(lambda record: record.initial if step == 0 else record.steps[step - 1]["weights"])

    def gradients(self, step: int) -> Shards:
        """Return the shards of a step's gradients, and of empty parameters, whose gradient may be None."""
        found = self._shards(lambda record: record.steps[step - 1]["gradients"])
        for name, shards in self.weights(step - 1).items():
            have = {shard.rank for shard in found.get(name, [])}
            empty = [shard for shard in shards if shard.rank not in have and not shard.value.numel()]
            if name in found:
                found[name] += empty
        return found

    def given(self, step: int) -> Shards:
        """Return the shards of the gradients that the optimizer was given in a step."""
        return self._shards(lambda record: record.steps[step - 1]["given"])

    def series(self, name: str, step: int) -> list[Any]:
        """Return a field of a step on each rank."""
        return [record.steps[step - 1][name] for record in self.ranks]

    def unequal(self) -> tuple[UnequalCopies, ...]:
        """Return copies of shared parameters that differ from the rank's first copy; only the first is compared."""
        return tuple(
            UnequalCopies(rank, name, (a, b), what, largest)
            for rank, record in enumerate(self.ranks)
            for name, a, b, what, largest in record.unequal
        )

    def _shards(self, of: Callable[[RankRecord], ShardsByName]) -> Shards:
        found: Shards = {}
        for rank, record in enumerate(self.ranks):
            for name, (offset, value) in of(record).items():
                found.setdefault(name, []).append(RecordedShard(rank, tuple(offset), value))
        return found


def is_bfloat16(values: Any) -> Any:
    """Return which elements of a NumPy array are bfloat16 numbers, as a mask."""
    found = torch.from_numpy(values)
    return (found.bfloat16().to(found.dtype) == found).numpy()


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


def other_contents(reference: Reference, num_ranks: int, samples: Iterable[int]) -> Iterator[tuple[str, Contents]]:
    """Yield the digests of samples if their windows were chosen otherwise, each with the cause."""
    if not isinstance(reference, ShowsSamples):
        return
    for cause, windows in _other_windows(reference.order, num_ranks):
        other = copy(reference)
        other.order = _Windows(windows, reference.order.num_windows)  # type: ignore[assignment]
        vars(other).update({name: {} for name, value in vars(reference).items() if isinstance(value, dict)})
        try:
            yield cause, {index: sample_digests(other.sample(index)) for index in samples}
        except (IndexError, KeyError, AttributeError):  # a reference of a family's own may need more of its order
            return


@dataclass(frozen=True)
class _Windows:
    """An order of samples that only tells their windows."""

    windows: Callable[[Any], Any]
    num_windows: int


def _other_windows(order: Any, num_ranks: int) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yield other choices of windows, each with what is then wrong."""
    size, due = order.num_windows, order.windows
    yield "each sample is the next window of the data", lambda i: (due(i) + 1) % size
    yield "each sample is the window before in the data", lambda i: (due(i) - 1) % size
    yield "samples are read in the order of the data: they are not shuffled", lambda i: np.asarray(i) % size
    yield "every epoch has the order of the first", lambda i: due(np.asarray(i) % order.first_repeat)
    for seed in (*range(order.seed + 1, order.seed + num_ranks), order.seed - 1, 0) if hasattr(order, "seed") else ():
        if seed >= 0 and seed != order.seed:
            cause = f"samples are shuffled by another seed: {seed} instead of {order.seed}"
            yield cause, replace(order, seed=seed).windows
    shares = getattr(order, "shares", ())
    if len(shares) > 1:
        equal = (sum(shares) // len(shares),) * (len(shares) - 1)
        for cause, found in (
            ("sources are read in equal shares", (*equal, sum(shares) - sum(equal))),
            ("the shares of sources are in another order: reversed", shares[::-1]),
        ):
            if found != shares:
                yield cause, replace(order, shares=found).windows
        first = order.parts[0].num_windows
        yield (
            "the second source's samples are read from the first",
            lambda i: np.where(due(i) >= first, (due(i) - first) % first, due(i)),
        )


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
