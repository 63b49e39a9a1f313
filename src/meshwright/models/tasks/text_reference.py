"""Reference implementations of the next-token loss, against which proofs compare the task: of windows of a stream, and
of packed documents one by one.

Shapes: b batch, t time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy import int64
from numpy.typing import NDArray
from torch import Tensor, nn

from meshwright.data.loader import IGNORED_TARGET
from meshwright.data.mixtures.mixture import Text, corpora, train_order
from meshwright.data.packed_corpus import packed_splits
from meshwright.data.packed_windows import PackedWindows
from meshwright.data.sources.source_text import Continued, Skipped, SourceText
from meshwright.data.text_corpus import Conversations, Corpus, Tokens
from meshwright.data.token_cache import SplitDocuments
from meshwright.models.contract.family import RunFacts
from meshwright.nn.attention.mask_spec import TokenLayout
from meshwright.nn.step_handles import handles

Span = tuple[int, int]
"""First input of a document, as a token of the split, and the number of its inputs."""
Pair = tuple[Tensor, Tensor]
"""Inputs of a document and their targets, [time] each; what doesn't count is `IGNORED_TARGET`."""
LossSum = Callable[[Tensor, Tensor], Tensor]
"""Sum of the losses of tokens, given logits […, v] and targets […], of which `IGNORED_TARGET` is none."""


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the cross-entropies of logits […, v], without those that have no target."""
    flat = logits.flatten(0, -2), targets.flatten()
    return F.cross_entropy(*flat, ignore_index=IGNORED_TARGET, reduction="sum")


class TextReference:
    """Next-token loss on windows of a text."""

    def __init__(self, f: RunFacts, text: Text, loss_sum: LossSum = cross_entropy_sum) -> None:
        self._loss_sum = loss_sum
        self._seq_len, self._global_batch, self._drops = f.seq_len, f.global_batch, f.dropout > 0
        self._windows: dict[int, Tensor] = {}  # a failed proof reads the same few for each variant
        self._sources = [corpus.train for corpus in corpora(text)]
        self.order = train_order(text, [(len(tokens) - 1) // f.seq_len for tokens in self._sources], f.seed)

    def loss(self, model: nn.Module, indices: list[int]) -> Tensor:
        """Return the contribution of samples `indices` to the mean loss per token of the global batch."""
        tokens, size = torch.stack([self._window(index) for index in indices]), self._seq_len
        # Dropout is a function of the samples' numbers; a model without it may take tokens alone.
        layout = (TokenLayout(size, samples=tuple(indices)),) if self._drops else ()
        logits = model(tokens[:, :-1], *layout)
        return self._loss_sum(logits, tokens[:, 1:]) / (self._global_batch * size)

    def sample(self, index: int) -> Mapping[str, Tensor]:
        """Return the tokens of a sample and their next tokens, [t] each."""
        tokens = self._window(index)
        return {"inputs": tokens[:-1], "targets": tokens[1:]}

    def _window(self, index: int) -> Tensor:
        if index in self._windows:
            return self._windows[index]
        window = int(self.order.windows(range(index, index + 1))[0])
        for tokens in self._sources:
            num_windows = (len(tokens) - 1) // self._seq_len
            if window < num_windows:
                break
            window -= num_windows
        start = window * self._seq_len
        self._windows[index] = torch.from_numpy(tokens[start : start + self._seq_len + 1].astype(int64))
        return self._windows[index]


class PackedTextReference:
    """Next-token loss on packed documents, document by document.

    A packed sample is only a list of documents here: each of them goes through the model alone, so neither masks nor
    padding exist. It shares with the task where each document starts and how long it is, and no more: which tokens of
    a conversation count is found again, from its text. Models that count or balance the tokens of full samples, padding
    included, get full samples instead.
    """

    def __init__(self, f: RunFacts, text: Text, loss_sum: LossSum = cross_entropy_sum) -> None:
        self._loss_sum = loss_sum
        self._sources = [_Source(corpus) for corpus in corpora(text)]
        self.order = train_order(text, [one.windows.num_windows for one in self._sources], f.seed)
        self._global_batch, self._seq_len, self._drops = f.global_batch, f.seq_len, f.dropout > 0

    def loss(self, model: nn.Module, indices: list[int]) -> Tensor:
        """Return the contribution of samples `indices`, all of one step, to the mean loss per target of its batch."""
        step = indices[0] // self._global_batch
        assert all(index // self._global_batch == step for index in indices), "the samples are of several steps"
        batch = range(step * self._global_batch, (step + 1) * self._global_batch)
        self._read_masks(batch)
        num_targets = sum(int((targets != IGNORED_TARGET).sum()) for i in batch for _, targets in self._pairs(i))
        if handles(model):
            # With their mask, all in one forward.
            samples = [self.sample(index) for index in indices]
            inputs, targets = (torch.stack([sample[part] for sample in samples]) for part in ("inputs", "targets"))
            return self._loss_sum(model(inputs, self._layout(indices)), targets) / num_targets
        if self._drops:
            return torch.stack([self._with_dropout(model, index) for index in indices]).sum() / num_targets
        sums = [documents_loss_sum(model, self._pairs(index), self._loss_sum) for index in indices]
        return torch.stack(sums).sum() / num_targets

    def sample(self, index: int) -> Mapping[str, Any]:
        """Return the tokens of a sample and their next tokens, [t] each, and its documents' lengths; padding has the
        id 0."""
        inputs = torch.zeros(self._seq_len, dtype=torch.int64)
        targets = torch.full_like(inputs, IGNORED_TARGET)
        pairs = self._pairs(index)
        filled = sum(len(one) for one, _ in pairs)
        inputs[:filled] = torch.cat([one for one, _ in pairs])
        targets[:filled] = torch.cat([one for _, one in pairs])
        return {"inputs": inputs, "targets": targets, "documents": self._documents(index)}

    def _with_dropout(self, model: nn.Module, index: int) -> Tensor:
        """Return the loss sum of a sample's documents, each alone, with the dropout of its place in the sample."""
        losses, start = [], 0
        for inputs, targets in self._pairs(index):
            place = (start, start + len(inputs))
            logits = model(inputs[None], self._layout([index]).on((((place,),),), 0))
            losses.append(self._loss_sum(logits, targets[None]))
            start = place[1]
        return torch.stack(losses).sum()

    def _layout(self, indices: list[int]) -> TokenLayout:
        return TokenLayout(self._seq_len, tuple(self._documents(index) for index in indices), tuple(indices))

    def _documents(self, index: int) -> tuple[int, ...]:
        """Return the lengths of a sample's documents, and of its padding if there is any."""
        lengths = [len(inputs) for inputs, _ in self._pairs(index)]
        rest = self._seq_len - sum(lengths)
        return (*lengths, *[rest] * (rest > 0))

    def _pairs(self, index: int) -> list[Pair]:
        """Return the documents of a sample."""
        source, window = self._place(index)
        return source.pairs([window])

    def _read_masks(self, indices: Iterable[int]) -> None:
        """Read what counts of all samples, in one pass over each source."""
        places = [self._place(index) for index in indices]
        for source in self._sources:
            if windows := [window for one, window in places if one is source]:
                source.pairs(windows)

    def _place(self, index: int) -> tuple[_Source, int]:
        """Return the source of a sample, and its window in it."""
        window = int(self.order.windows(range(index, index + 1))[0])
        number = 0
        while window >= self._sources[number].windows.num_windows:
            window -= self._sources[number].windows.num_windows
            number += 1
        return self._sources[number], window


class _Source:
    """Documents of a corpus, and which of their tokens count."""

    def __init__(self, corpus: Corpus) -> None:
        self._tokens, self.windows = corpus.train, packed_splits(corpus).train
        self._masks = None
        if corpus.conversations is not None:
            assert corpus.train_documents is not None, "the corpus is packed"
            self._masks = RereadMasks(corpus.conversations, corpus.train_documents)

    def pairs(self, windows: Iterable[int]) -> list[Pair]:
        """Return the documents of windows."""
        spans = [span for window in windows for span in document_spans(self.windows, window)]
        pairs = document_pairs(self._tokens, spans)
        if self._masks is None:
            return pairs
        self._masks.read(start for start, _ in spans)
        counts = [torch.from_numpy(self._masks.targets(*span)) for span in spans]
        return [
            (one, targets.where(count, IGNORED_TARGET)) for (one, targets), count in zip(pairs, counts, strict=True)
        ]


def document_spans(windows: PackedWindows, window: int) -> list[Span]:
    """Return the documents of a packed window."""
    first, last = int(windows.first_pieces[window]), int(windows.first_pieces[window + 1])
    return [(int(piece["start"]), int(piece["length"])) for piece in windows.pieces[first:last]]


def document_pairs(tokens: Tokens, spans: Iterable[Span]) -> list[Pair]:
    """Return the inputs and targets of documents, given the tokens of the split."""
    found = [torch.from_numpy(tokens[start : start + length + 1].astype(int64)) for start, length in spans]
    return [(document[:-1], document[1:]) for document in found]


def documents_loss_sum(model: nn.Module, pairs: Iterable[Pair], loss_sum: LossSum = cross_entropy_sum) -> Tensor:
    """Return the sum of the losses of documents, each alone through the model."""
    return torch.stack([loss_sum(model(inputs[None]), targets[None]) for inputs, targets in pairs]).sum()


class RereadMasks:
    """Masks of the documents of a training split."""

    def __init__(self, conversations: Conversations, documents: SplitDocuments) -> None:
        self._conversations, self._documents = conversations, documents
        self._ends = documents.ends.astype(np.int64) - documents.split_start
        self._masks: dict[int, NDArray[np.bool_]] = {}

    def read(self, starts: Iterable[int]) -> None:
        """Read the documents in which pieces start, given their first tokens, in one pass over the source."""
        missing = {self._document(start) for start in starts} - self._masks.keys()
        if not missing:
            return
        number = 0
        for text in self._conversations.source.splits(Skipped())[0]:
            if number in missing:
                self._masks[number] = self._mask(text, number)
            number += not isinstance(text, Continued)
            if number > max(missing):
                return

    def targets(self, start: int, length: int) -> NDArray[np.bool_]:
        """Return whether the targets of `length` inputs from token `start` of the split count."""
        document = self._document(start)
        first = start - self._bounds(document)[0] + 1
        return self._masks[document][first : first + length]

    def _mask(self, text: SourceText, number: int) -> NDArray[np.bool_]:
        """Return the mask of a document, by marking each character that the assistant says."""
        begin, end = self._bounds(number)
        if isinstance(text, str | Continued):
            return np.ones(end - begin, dtype=np.bool_)
        written = text.format.write(text, day=self._conversations.day)
        is_said = [any(first <= at < last for first, last in written.spans) for at in range(len(written.text))]
        (encoding,) = text.format.encodings([written])
        assert len(encoding.ids) == end - begin, f"{text.place} has other tokens than the cache"
        return np.array([any(is_said[first : max(last, first + 1)]) for first, last in encoding.offsets])

    def _document(self, token: int) -> int:
        """Return the document that has a token of the split."""
        return int(np.searchsorted(self._ends, token, side="right"))

    def _bounds(self, document: int) -> tuple[int, int]:
        return int(self._ends[document - 1]) if document else 0, int(self._ends[document])
