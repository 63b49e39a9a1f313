"""The reference with a fault of context parallelism: full samples in one process, tokens read as a faulty rank would.

Unlike the reference that decides whether a proof passes, it reads batches through the task, which knows documents and
masks of full samples. It is used only to name a fault after a proof has failed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.models.contract.family import TrainingData
from meshwright.models.contract.task import Batch, Reference, Task
from meshwright.nn.attention.mask_spec import TokenLayout
from meshwright.prove.placement import ContextPlacement
from meshwright.prove.record.faulty_context import ContextFault, damaged
from meshwright.prove.record.token_table import TokenTable


@dataclass(frozen=True)
class ChangedBatch:
    """A batch with other inputs or targets."""

    inputs: Tensor
    targets: Tensor
    conditions: tuple[Any, ...]


class TokenReference(Reference):
    """Mean loss of a family's task with a fault."""

    def __init__(
        self, config: RunConfig, data: TrainingData, placement: ContextPlacement, fault: ContextFault | None = None
    ) -> None:
        self.family, self._placement, self._fault = config.family, placement, fault or ContextFault()
        self._global_batch = config.train.global_batch
        self.task: Task = config.family.task(run_facts(config), data, torch.device("cpu"))

    def loss(self, model: nn.Module, indices: list[int]) -> Tensor:
        """Return the contribution of consecutive samples to the batch's mean loss."""
        batch, table = self.batch(indices)
        own_bt = table.own_bt()
        inputs, targets = (
            _take(x, self._fault.index(name, table, own_bt))
            for name, x in (("inputs", batch.inputs), ("targets", batch.targets))
        )
        with damaged(model, self._fault, table):
            out = self.family.run(model, inputs, ChangedBatch(inputs, targets, batch.conditions))
        return self.task.loss_sum(out, targets) / self.num_units(indices)

    def batch(self, indices: list[int]) -> tuple[Batch, TokenTable]:
        """Return a batch of consecutive samples, and the ranks of its tokens."""
        batch = self.task.batch(range(indices[0], indices[-1] + 1))
        layout = next(one for one in batch.conditions if isinstance(one, TokenLayout))
        return batch, TokenTable.make(layout, self._placement.shards(layout.documents))

    def num_units(self, indices: list[int]) -> int:
        """Return the number of loss units in the global batch of the samples."""
        first = indices[0] // self._global_batch * self._global_batch
        return self.task.count(range(first, first + self._global_batch))


def _take(x_bt: Tensor, index_bt: Tensor) -> Tensor:
    index = index_bt.reshape(*index_bt.shape, *[1] * (x_bt.dim() - 2))
    return x_bt.take_along_dim(index.expand(len(x_bt), *index.shape[1:]), dim=1)
