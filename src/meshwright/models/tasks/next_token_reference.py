"""Reference implementation of the next-token loss, sample by sample, against which proofs compare the task.

Shapes: b batch, t time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from numpy import int64
from torch import Tensor, nn

from meshwright.data.sampler import WindowOrder
from meshwright.data.text_corpus import Corpus
from meshwright.models.contract.run_facts import RunFacts
from meshwright.nn.attention.token_layout import TokenLayout


class TextReference:
    """Next-token cross-entropy on windows of a corpus."""

    def __init__(self, f: RunFacts, corpus: Corpus) -> None:
        self._seq_len, self._global_batch, self._tokens = f.seq_len, f.global_batch, corpus.train
        self._drops = f.dropout > 0
        self.order = WindowOrder((len(corpus.train) - 1) // f.seq_len, f.seed)

    def loss(self, model: nn.Module, indices: list[int]) -> Tensor:
        """Return the contribution of samples `indices` to the mean loss per token of the global batch."""
        tokens, size = torch.stack([self._window(index) for index in indices]), self._seq_len
        # Dropout is a function of the samples' numbers; a model without it may take tokens alone.
        layout = (TokenLayout(size, samples=tuple(indices)),) if self._drops else ()
        logits = model(tokens[:, :-1], *layout)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        return loss / (self._global_batch * size)

    def sample(self, index: int) -> Mapping[str, Tensor]:
        """Return the tokens of a sample and their next tokens, [t] each."""
        tokens = self._window(index)
        return {"inputs": tokens[:-1], "targets": tokens[1:]}

    def _window(self, index: int) -> Tensor:
        start = int(self.order.windows(range(index, index + 1))[0]) * self._seq_len
        return torch.from_numpy(self._tokens[start : start + self._seq_len + 1].astype(int64))
