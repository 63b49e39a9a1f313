"""What a kind of model is trained on and by what loss: everything in a run that text and pictures differ in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from meshwright.train.reporter import LossUnit
from meshwright.train.stages import Batch, Pipeline


class Task(ABC):
    """A kind of training, on this rank."""

    unit: LossUnit
    """What a loss is in, for people."""
    units_a_sample: int
    """What a sample adds to the count that the loss is a mean over."""

    @abstractmethod
    def batch(self, samples: range) -> Batch:
        """Some samples of the run, counted from its start over all ranks, in their order."""

    @abstractmethod
    def loss_sum(self, out: Tensor, targets: Tensor) -> Tensor:
        """The sum of the losses of a micro-batch's units: a scalar in at least float32, to run backward from."""

    @abstractmethod
    def validation(self, *, batch_size: int, data_parallel: int, data_index: int) -> list[Batch]:
        """One share of the held-out samples, the same at every validation.

        Every share has as many batches, all of `batch_size` samples. A sample that only fills up counts for nothing.
        """

    @abstractmethod
    def validation_sums(self, out: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """As `loss_sum`, and the number of units in it."""

    def after_validation(self, pipeline: Pipeline, step: int, folder: Path) -> Mapping[str, float]:
        """Show what the model has learned, in files of the run folder; further figures by name. All ranks call it."""
        return {}

    def sample(self, pipeline: Pipeline) -> str | None:
        """Text that the trained model writes, if it does. All ranks call it."""
        return None
