"""Task and reference of text runs: on windows of a stream, or on packed documents."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.data.mixtures.joined_windows import JoinedPacked
from meshwright.data.mixtures.mixture import Text, corpora, validation_shares
from meshwright.data.packed_corpus import packed_splits
from meshwright.data.packed_loader import PackedBatch, PackedLoader, packed_validation_batches
from meshwright.models.contract.run_facts import RunFacts
from meshwright.models.contract.task import Batch, BatchUse, HostBatch, Reference, Task
from meshwright.models.tasks.next_token import NextTokenTask, OwnLoss, TextBatch, TextTask
from meshwright.models.tasks.next_token_reference import LossSum, TextReference, cross_entropy_sum
from meshwright.models.tasks.packed_reference import PackedTextReference
from meshwright.nn.attention.token_layout import TokenLayout


def text_task(f: RunFacts, text: Text, device: torch.device, loss: OwnLoss | None = None) -> Task:
    """Return the next-token task for a text, packed if the text is."""
    return (PackedTextTask if _is_packed(text) else TextTask)(f, text, device, loss)


def text_reference(f: RunFacts, text: Text, loss_sum: LossSum = cross_entropy_sum) -> Reference:
    """Return the reference implementation of the next-token loss for a text, packed if the text is."""
    return (PackedTextReference if _is_packed(text) else TextReference)(f, text, loss_sum)


def _is_packed(text: Text) -> bool:
    return corpora(text)[0].packed is not None


class PackedTextTask(NextTokenTask):
    """Next-token prediction on windows of packed documents.

    The loss is the mean over the targets of the global batch; the first token of a document is no target.
    """

    def __init__(self, f: RunFacts, text: Text, device: torch.device, loss: OwnLoss | None = None) -> None:
        super().__init__(f, text, device, loss)
        train = JoinedPacked(tuple(packed_splits(corpus).train for corpus in corpora(text)))
        self._validation = JoinedPacked(tuple(packed_splits(one).validation for one, _ in validation_shares(text)))
        self._loader = PackedLoader(train, self._order, device)
        self.units_a_sample = None

    def batch(self, samples: range) -> Batch:
        """Return the windows of the training samples."""
        return self.prepare(samples, BatchUse()).to(self._device)

    def prepare(self, samples: range, use: BatchUse) -> HostBatch:
        """Read the windows of the training samples; inputs and targets come from one read."""
        host = self._loader.host_batch(samples)

        def assemble(tensors: tuple[Tensor, ...]) -> Batch:
            inputs, targets = tensors
            return self._text_batch(PackedBatch(inputs, targets, host.documents), tuple(samples))

        return HostBatch((host.inputs, host.targets), assemble)

    def count(self, samples: range) -> int:
        """Return the number of targets in the training samples, without reading tokens."""
        return self._loader.count(samples)

    def validation(self, *, batch_size: int, data_parallel: int, data_index: int) -> list[Batch]:
        """Return this rank's windows of the held-out documents, evenly spread."""
        batches = packed_validation_batches(
            self._validation,
            self._chosen(self._validation.sources),
            batch_size=batch_size,
            data_parallel=data_parallel,
            data_index=data_index,
            device=self._device,
        )
        return [self._text_batch(batch) for batch in batches]

    def _text_batch(self, batch: PackedBatch, samples: tuple[int, ...] | None = None) -> TextBatch:
        layout = TokenLayout(self._run.seq_len, documents=batch.documents, samples=samples)
        return TextBatch(batch.inputs, batch.targets, layout)
