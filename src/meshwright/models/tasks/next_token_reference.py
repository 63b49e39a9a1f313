"""Reference implementation of the next-token loss, sample by sample, against which proofs compare the task.

Shapes: b batch, t time.
"""

from __future__ import annotations

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
        self._order = WindowOrder((len(corpus.train) - 1) // f.seq_len, f.seed)

    def loss(self, model: nn.Module, indices: list[int]) -> Tensor:
        """Return the contribution of samples `indices` to the mean loss per token of the global batch."""
        size = self._seq_len
        rows = []
        for index in indices:
            start = int(self._order.windows(range(index, index + 1))[0]) * size
            rows.append(torch.from_numpy(self._tokens[start : start + size + 1].astype(int64)))
        tokens = torch.stack(rows)
        # Dropout is a function of the samples' numbers; a model without it may take tokens alone.
        layout = (TokenLayout(size, samples=tuple(indices)),) if self._drops else ()
        logits = model(tokens[:, :-1], *layout)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        return loss / (self._global_batch * size)
