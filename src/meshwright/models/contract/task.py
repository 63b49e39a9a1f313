"""Interface of a training task on one rank: batches, loss and validation, and forward passes available to the task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from meshwright.data.sampler import SampleOrder
from meshwright.models.contract.model_facts import LossUnit


class Batch(Protocol):
    """A micro-batch. Each stage accesses only the properties it needs, so they can be computed lazily."""

    @property
    def inputs(self) -> Tensor:
        """Inputs of the first stage."""

    @property
    def targets(self) -> Tensor:
        """Targets for the last stage's output."""

    @property
    def conditions(self) -> tuple[Any, ...]:
        """Additional inputs of every stage."""


@dataclass(frozen=True)
class SimpleBatch:
    """A micro-batch without targets."""

    inputs: Tensor
    conditions: tuple[Any, ...] = ()

    @property
    def targets(self) -> Tensor:
        """The inputs, as a placeholder."""
        return self.inputs


@dataclass(frozen=True)
class HostBatch:
    """Host side of a micro-batch: its tensors on the CPU, and what makes the batch once they are on the device."""

    tensors: tuple[Tensor, ...]
    """CPU tensors of any shape and dtype, which are not written any more."""
    assemble: Callable[[tuple[Tensor, ...]], Batch]
    """Make the batch from the tensors on the device; called in the step, on the thread and stream that computes."""

    def to(self, device: torch.device) -> Batch:
        """Copy the tensors to a device now, and return the batch."""
        return self.assemble(tuple(x.to(device) for x in self.tensors))


@dataclass(frozen=True)
class BatchUse:
    """What the stages of a rank read of its batches, besides the conditions that every stage reads."""

    inputs: bool = True
    targets: bool = True


class RunsForward(Protocol):
    """Callable that runs micro-batches through the model."""

    def __call__(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Return the last stage's outputs in order, gathered over tp; an empty list on ranks without the last stage."""


class Forward(Protocol):
    """Forward passes of the model being trained, on any layout; all ranks must take part."""

    rank: int
    source: int
    """The lowest rank that holds the last stage's outputs."""
    device: torch.device

    def evaluating(self, num_batches: int, batch_size: int) -> AbstractContextManager[RunsForward]:
        """Put the model in eval mode; each call then runs `num_batches` micro-batches of `batch_size` samples."""


class Task(ABC):
    """A training task on this rank."""

    unit: LossUnit
    """Display unit of the loss."""
    units_per_sample: int | None
    """Number of loss units per sample, over which the loss is averaged; None if it varies (see `count`)."""

    @abstractmethod
    def batch(self, samples: range) -> Batch:
        """Return a batch of the given samples, in order; numbering begins with the run and spans all ranks."""

    def prepare(self, samples: range, use: BatchUse) -> HostBatch:
        """Prepare the host side of `batch(samples)`, in a worker thread while earlier steps run (`data.prefetch`).

        The batch must equal that of `batch` bitwise. Like `batch` this is a pure function of the samples: it may be
        called for batches that are never used, and does not touch the device or the default random generators.
        Override both or neither; by default nothing is prepared, and the step calls `batch` when it needs it.

        Args:
            samples: as for `batch`.
            use: what to prepare; other properties of the batch may be made later, when they are read.
        """
        return HostBatch((), lambda _: self.batch(samples))

    @abstractmethod
    def loss_sum(self, out: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses over a micro-batch's units: a differentiable scalar, at least float32.

        `out` is the last stage's output or, if the family's last end has a head (`KindFacts.head`) that has computed
        the loss itself, that sum.
        """

    def count(self, samples: range) -> int:
        """Return the number of loss units in the given samples; override this if the number varies between samples."""
        assert self.units_per_sample is not None, "a task whose samples differ counts them"
        return self.units_per_sample * len(samples)

    @abstractmethod
    def validation(self, *, batch_size: int, data_parallel: int, data_index: int) -> list[Batch]:
        """Return one rank's share of the held-out samples, the same for each validation.

        All shares have the same number of batches of `batch_size` samples. Padding samples are not counted.
        """

    @abstractmethod
    def validation_sums(self, out: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of losses, like `loss_sum` but without terms for training alone, and its number of units."""

    def after_validation(self, forward: Forward, step: int, folder: Path) -> Mapping[str, float | Path]:
        """Write files that show what the model has learned to the run folder, and return additional metrics and, for
        trackers, the paths of images, by name. Called on all ranks; what rank 0 returns counts."""
        return {}

    def end_ids(self) -> tuple[int, ...]:
        """Return the ids of the tokens with which generation ends, as the training data teaches: exports name them."""
        return ()

    def sample(self, forward: Forward) -> str | None:
        """Return text generated by the trained model, or None. Called on all ranks."""
        return None


def prepare_batch(task: Task, samples: range, use: BatchUse) -> HostBatch:
    """Return the task's `prepare`; the default one if `batch` was overridden without it, below an inherited `prepare`.

    The inherited one would return the samples of the batch that was overridden.
    """
    definers = (vars(task), *map(vars, type(task).__mro__))
    first = next(names for names in definers if "batch" in names or "prepare" in names)
    return task.prepare(samples, use) if "prepare" in first else Task.prepare(task, samples, use)


class Reference(Protocol):
    """Independent, plain implementation of the loss for `prove` that shares no code with the task."""

    def loss(self, model: torch.nn.Module, indices: list[int]) -> Tensor:
        """Return the contribution of the given samples to the batch's mean loss, in float64."""


@runtime_checkable
class ShowsSamples(Protocol):
    """A reference that also tells what a sample is, so that proofs can name wrong data as such."""

    order: SampleOrder
    """Order in which a run reads its data."""

    def sample(self, index: int) -> Mapping[str, Any]:
        """Return the `inputs` and `targets` of a sample as tensors without a batch dim, and its conditions by the
        family's names for them; `documents` are the lengths of a packed sample's documents."""
