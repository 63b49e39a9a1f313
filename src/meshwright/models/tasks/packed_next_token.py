"""Next-token prediction on packed documents. Samples have different numbers of targets, so the task counts them.

Shapes: b batch, t time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.data.packed_loader import PackedLoader, packed_validation_batches
from meshwright.data.packed_windows import Documents
from meshwright.data.sampler import WindowOrder
from meshwright.data.text_corpus import Corpus
from meshwright.models.contract.run_facts import RunFacts
from meshwright.models.contract.task import Batch
from meshwright.models.tasks.next_token import NextTokenTask
from meshwright.nn.attention.token_layout import TokenLayout


@dataclass(frozen=True)
class PackedTextBatch:
    """Token ids and their next tokens, both [b, t], of packed documents."""

    inputs: Tensor
    targets: Tensor
    documents: Documents
    samples: tuple[int, ...] | None = None
    """Numbers of the samples; None in validation."""

    @property
    def conditions(self) -> tuple[TokenLayout]:
        """The documents of each sample, which don't attend to each other."""
        return (TokenLayout(self.inputs.shape[1], documents=self.documents, samples=self.samples),)


class PackedTextTask(NextTokenTask):
    """Next-token prediction on windows of packed documents.

    The loss is the mean over the targets of the global batch; the first token of a document is no target.
    """

    def __init__(self, f: RunFacts, corpus: Corpus, device: torch.device) -> None:
        super().__init__(f, corpus, device)
        assert corpus.packed is not None, "the corpus is not packed"
        self._windows = corpus.packed
        self._loader = PackedLoader(self._windows.train, WindowOrder(self._windows.train.num_windows, f.seed), device)
        self.units_a_sample = None

    def batch(self, samples: range) -> Batch:
        """Return the windows of the training samples."""
        return PackedTextBatch(*self._loader.batch(samples), samples=tuple(samples))

    def count(self, samples: range) -> int:
        """Return the number of targets in the training samples, without reading tokens."""
        return self._loader.count(samples)

    def validation(self, *, batch_size: int, data_parallel: int, data_index: int) -> list[Batch]:
        """Return this rank's windows of the held-out documents, evenly spread."""
        batches = packed_validation_batches(
            self._windows.validation,
            num_samples=self._run.validation_samples,
            batch_size=batch_size,
            data_parallel=data_parallel,
            data_index=data_index,
            device=self._device,
        )
        return [PackedTextBatch(*batch) for batch in batches]
