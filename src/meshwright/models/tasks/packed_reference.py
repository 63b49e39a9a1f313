"""Reference implementation of the next-token loss on packed documents, document by document.

A packed sample is only a list of documents here: each of them goes through the model alone, so neither masks nor
positions nor padding exist. It shares with the task where each document starts and how long it is, and no more.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from numpy import int64
from torch import Tensor, nn

from meshwright.data.packed_windows import PackedWindows
from meshwright.data.sampler import WindowOrder
from meshwright.data.text_corpus import Corpus, Tokens
from meshwright.models.contract.run_facts import RunFacts

Span = tuple[int, int]
"""First input of a document, as a token of the split, and the number of its inputs."""


class PackedTextReference:
    """Next-token cross-entropy on the documents of packed windows."""

    def __init__(self, f: RunFacts, corpus: Corpus) -> None:
        assert corpus.packed is not None, "the corpus is not packed"
        self._global_batch, self._tokens, self._windows = f.global_batch, corpus.train, corpus.packed.train
        self._order = WindowOrder(self._windows.num_windows, f.seed)

    def loss(self, model: nn.Module, indices: list[int]) -> Tensor:
        """Return the contribution of samples `indices`, all of one step, to the mean loss per target of its batch."""
        step = indices[0] // self._global_batch
        assert all(index // self._global_batch == step for index in indices), "the samples are of several steps"
        batch = range(step * self._global_batch, (step + 1) * self._global_batch)
        num_targets = sum(length for index in batch for _, length in self._spans(index))
        return documents_loss_sum(model, self._tokens, (span for i in indices for span in self._spans(i))) / num_targets

    def _spans(self, index: int) -> list[Span]:
        return document_spans(self._windows, int(self._order.windows(range(index, index + 1))[0]))


def document_spans(windows: PackedWindows, window: int) -> list[Span]:
    """Return the documents of a packed window."""
    first, last = int(windows.first_pieces[window]), int(windows.first_pieces[window + 1])
    return [(int(piece["start"]), int(piece["length"])) for piece in windows.pieces[first:last]]


def documents_loss_sum(model: nn.Module, tokens: Tokens, spans: Iterable[Span]) -> Tensor:
    """Return the sum of the cross-entropies of documents, each alone through the model.

    Args:
        model: maps ids [1, time] to logits [1, time, vocabulary].
        tokens: tokens of the split.
        spans: documents, at least one.
    """
    losses = []
    for start, length in spans:
        document = torch.from_numpy(tokens[start : start + length + 1].astype(int64))
        logits = model(document[None, :-1])[0]
        losses.append(F.cross_entropy(logits, document[1:], reduction="sum"))
    return torch.stack(losses).sum()
