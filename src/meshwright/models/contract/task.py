"""What a family is trained on and by what loss, on one rank; and the forward passes that it may ask for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.models.contract.loss_unit import LossUnit


class Batch(Protocol):
    """A micro-batch. Stages ask only for what they need, and nothing else has to be made."""

    @property
    def inputs(self) -> Tensor:
        """What the first stage takes."""

    @property
    def targets(self) -> Tensor:
        """What the last stage's output is compared with."""

    @property
    def conditions(self) -> tuple[Any, ...]:
        """What every stage is told besides."""


@dataclass(frozen=True)
class SimpleBatch:
    """A micro-batch that is compared with nothing."""

    inputs: Tensor
    conditions: tuple[Any, ...] = ()

    @property
    def targets(self) -> Tensor:
        """Stands where targets are asked for."""
        return self.inputs


class RunsForward(Protocol):
    """Micro-batches in, the last stage's outputs out."""

    def __call__(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Outputs in order, full along tp, on ranks that have the last stage; none on others."""


class Forward(Protocol):
    """Forward passes of the model under training, on whatever layout it is: all ranks call alike."""

    rank: int
    source: int
    """The first rank with the last stage's outputs."""
    device: torch.device

    def evaluating(self, num_batches: int, batch_size: int) -> AbstractContextManager[RunsForward]:
        """The model in evaluation mode, for so many micro-batches of so many samples at a time."""


class Task(ABC):
    """A kind of training, on this rank."""

    unit: LossUnit
    """What a loss is in, for people."""
    units_a_sample: int | None
    """What a sample adds to the count that the loss is a mean over; None where `count` says it of each."""

    @abstractmethod
    def batch(self, samples: range) -> Batch:
        """Some samples of the run, counted from its start over all ranks, in their order."""

    @abstractmethod
    def loss_sum(self, out: Tensor, targets: Tensor) -> Tensor:
        """The sum of the losses of a micro-batch's units: a scalar in at least float32, to run backward from."""

    def count(self, samples: range) -> int:
        """The units in some samples, where they differ from sample to sample."""
        assert self.units_a_sample is not None, "a task whose samples differ counts them"
        return self.units_a_sample * len(samples)

    @abstractmethod
    def validation(self, *, batch_size: int, data_parallel: int, data_index: int) -> list[Batch]:
        """One share of the held-out samples, the same at every validation.

        Every share has as many batches, all of `batch_size` samples. A sample that only fills up counts for nothing.
        """

    @abstractmethod
    def validation_sums(self, out: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """As `loss_sum`, and the number of units in it."""

    def after_validation(self, forward: Forward, step: int, folder: Path) -> Mapping[str, float]:
        """Show what the model has learned, in files of the run folder; further figures by name. All ranks call it."""
        return {}

    def sample(self, forward: Forward) -> str | None:
        """Text that the trained model writes, if it does. All ranks call it."""
        return None


class Reference(Protocol):
    """The loss of samples written out plainly, for proofs: none of the task's code that is proved."""

    def loss(self, model: torch.nn.Module, indices: list[int]) -> Tensor:
        """What some of a batch's samples add to the mean loss of the batch, in float64."""
