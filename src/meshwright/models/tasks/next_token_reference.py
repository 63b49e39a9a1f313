"""Reference implementation of the next-token loss, sample by sample, against which proofs compare the task.

Shapes: b batch, t time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from numpy import int64
from torch import Tensor, nn

from meshwright.data.loader import IGNORED_TARGET
from meshwright.data.mixtures.mixture import Text, corpora, train_order
from meshwright.models.contract.run_facts import RunFacts
from meshwright.nn.attention.mask_spec import TokenLayout

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
        if index not in self._windows:
            self._windows[index] = self._read(index)
        return self._windows[index]

    def _read(self, index: int) -> Tensor:
        window = int(self.order.windows(range(index, index + 1))[0])
        for tokens in self._sources:
            num_windows = (len(tokens) - 1) // self._seq_len
            if window < num_windows:
                break
            window -= num_windows
        start = window * self._seq_len
        return torch.from_numpy(tokens[start : start + self._seq_len + 1].astype(int64))
