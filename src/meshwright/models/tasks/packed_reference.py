"""Reference implementation of the next-token loss on packed documents, document by document.

A packed sample is only a list of documents here: each of them goes through the model alone, so neither masks nor
padding exist. It shares with the task where each document starts and how long it is, and no more.

Models that count or balance the tokens of full samples, padding included, get full samples instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from numpy import int64
from torch import Tensor, nn

from meshwright.data.loader import IGNORED_TARGET
from meshwright.data.mixtures.mixture import Text, corpora, train_order
from meshwright.data.packed_corpus import packed_splits
from meshwright.data.packed_windows import PackedWindows
from meshwright.data.text_corpus import Tokens
from meshwright.models.contract.run_facts import RunFacts
from meshwright.nn.attention.token_layout import TokenLayout
from meshwright.nn.step_handles import handles

Span = tuple[int, int]
"""First input of a document, as a token of the split, and the number of its inputs."""


class PackedTextReference:
    """Next-token cross-entropy on the documents of packed windows."""

    def __init__(self, f: RunFacts, text: Text) -> None:
        self._sources = [(corpus.train, packed_splits(corpus).train) for corpus in corpora(text)]
        self.order = train_order(text, [windows.num_windows for _, windows in self._sources], f.seed)
        self._global_batch, self._seq_len, self._drops = f.global_batch, f.seq_len, f.dropout > 0

    def loss(self, model: nn.Module, indices: list[int]) -> Tensor:
        """Return the contribution of samples `indices`, all of one step, to the mean loss per target of its batch."""
        step = indices[0] // self._global_batch
        assert all(index // self._global_batch == step for index in indices), "the samples are of several steps"
        batch = range(step * self._global_batch, (step + 1) * self._global_batch)
        num_targets = sum(length for index in batch for _, length in self._spans(index)[1])
        if handles(model):
            return self._full_samples(model, indices) / num_targets
        if self._drops:
            return torch.stack([self._with_dropout(model, index) for index in indices]).sum() / num_targets
        return torch.stack([documents_loss_sum(model, *self._spans(i)) for i in indices]).sum() / num_targets

    def sample(self, index: int) -> Mapping[str, Any]:
        """Return the tokens of a sample and their next tokens, [t] each, and its documents' lengths; padding has the
        id 0."""
        inputs = torch.zeros(self._seq_len, dtype=torch.int64)
        targets = torch.full_like(inputs, IGNORED_TARGET)
        tokens, spans = self._spans(index)
        documents = [_tokens(tokens, span) for span in spans]
        filled = sum(len(document) - 1 for document in documents)
        inputs[:filled] = torch.cat([document[:-1] for document in documents])
        targets[:filled] = torch.cat([document[1:] for document in documents])
        return {"inputs": inputs, "targets": targets, "documents": self._documents(index)}

    def _full_samples(self, model: nn.Module, indices: list[int]) -> Tensor:
        """Return the loss sum of samples with their mask, all in one forward."""
        samples = [self.sample(index) for index in indices]
        inputs, targets = (torch.stack([sample[part] for sample in samples]) for part in ("inputs", "targets"))
        logits = model(inputs, self._layout(indices))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum")

    def _with_dropout(self, model: nn.Module, index: int) -> Tensor:
        """Return the loss sum of a sample's documents, each alone, with the dropout of its place in the sample."""
        losses, start = [], 0
        tokens, spans = self._spans(index)
        for span in spans:
            document, place = _tokens(tokens, span), (start, start + span[1])
            logits = model(document[None, :-1], self._layout([index]).on((((place,),),), 0))[0]
            losses.append(F.cross_entropy(logits, document[1:], reduction="sum"))
            start = place[1]
        return torch.stack(losses).sum()

    def _layout(self, indices: list[int]) -> TokenLayout:
        return TokenLayout(self._seq_len, tuple(self._documents(index) for index in indices), tuple(indices))

    def _documents(self, index: int) -> tuple[int, ...]:
        """Return the lengths of a sample's documents, and of its padding if there is any."""
        lengths = [length for _, length in self._spans(index)[1]]
        rest = self._seq_len - sum(lengths)
        return (*lengths, *[rest] * (rest > 0))

    def _spans(self, index: int) -> tuple[Tokens, list[Span]]:
        """Return the tokens of a sample's source, and the sample's documents in them."""
        window = int(self.order.windows(range(index, index + 1))[0])
        source = 0
        while window >= self._sources[source][1].num_windows:
            window -= self._sources[source][1].num_windows
            source += 1
        tokens, windows = self._sources[source]
        return tokens, document_spans(windows, window)


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
        document = _tokens(tokens, (start, length))
        logits = model(document[None, :-1])[0]
        losses.append(F.cross_entropy(logits, document[1:], reduction="sum"))
    return torch.stack(losses).sum()


def _tokens(tokens: Tokens, span: Span) -> Tensor:
    """Return the tokens of a document: its inputs, and one more."""
    start, length = span
    return torch.from_numpy(tokens[start : start + length + 1].astype(int64))
