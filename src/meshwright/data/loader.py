"""Windows of a corpus as tensors on a device.

Shapes: b samples, t tokens of a sample (seq_len), w windows of the corpus.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.data.sampler import WindowOrder
from meshwright.data.text_corpus import Tokens, num_windows

IGNORED_TARGET = -100
"""Target of a token that counts for nothing: `torch.nn.functional.cross_entropy` leaves it out by default."""


class Loader:
    """Any sample of a run, at random: it keeps no position, so it has no state to save.

    Args:
        corpus_part: token ids, 1-D; usually memory-mapped.
        order: over exactly the windows of the part.
        seq_len: tokens a sample.
        device: where batches go.
    """

    def __init__(self, corpus_part: Tokens, order: WindowOrder, seq_len: int, device: torch.device) -> None:
        assert order.num_windows == num_windows(corpus_part, seq_len), "the order is over another corpus"
        self.order = order
        self._windows = _windows(corpus_part, seq_len)
        self._device = device

    def batch(self, samples: range) -> tuple[Tensor, Tensor]:
        """Inputs and targets of some samples, in their order: `inputs_bt` and `targets_bt`, both int64."""
        return _to_tensors(self._windows, self.order.windows(samples), self._device)


def validation_batches(
    corpus_part: Tokens,
    *,
    seq_len: int,
    num_samples: int,
    batch_size: int,
    data_parallel: int,
    data_index: int,
    device: torch.device,
) -> Iterator[tuple[Tensor, Tensor]]:
    """One data-parallel share of a fixed set of validation samples.

    The samples are windows spread evenly over the part, in order, the same at every validation and on every
    layout; shares are contiguous blocks of them. Every share gets the same number of batches of the same
    shapes, so that collectives within a forward pass match, and what goes from stage to stage fits: rows that only
    fill up the last batch, or a share with a sample less than others (or none at all), have the target
    `IGNORED_TARGET` everywhere. Sum the losses of the other tokens, count them, and divide after summing both over
    the shares.

    Args:
        corpus_part: token ids, 1-D.
        seq_len: tokens a sample.
        num_samples: samples over all shares; all windows of the part when it has fewer.
        batch_size: samples of a batch, rows that fill it up included.
        data_parallel: number of shares.
        data_index: the share asked for.
        device: where batches go.

    Yields:
        `inputs_bt` and `targets_bt`, both int64.
    """
    windows_w = _windows(corpus_part, seq_len)
    chosen = validation_windows(len(windows_w), num_samples)
    first, last = (len(chosen) * index // data_parallel for index in (data_index, data_index + 1))
    num_rows = -(-len(chosen) // data_parallel)
    for start in range(0, num_rows, batch_size):
        own = chosen[first + start : min(first + start + batch_size, last)]
        padding = np.zeros(batch_size - len(own), dtype=np.int64)
        inputs_bt, targets_bt = _to_tensors(windows_w, np.concatenate([own, padding]), device)
        targets_bt[len(own) :] = IGNORED_TARGET
        yield inputs_bt, targets_bt


def validation_windows(num_windows: int, num_samples: int) -> NDArray[np.int64]:
    """The windows a validation reads: `num_samples` different ones, ascending and evenly spread, or all."""
    count = min(num_samples, num_windows)
    return np.arange(count, dtype=np.int64) * num_windows // max(1, count)


def _windows(corpus_part: Tokens, seq_len: int) -> Tokens:
    """All windows of a part as an array of shape (w, t + 1), which is a view: nothing is read or copied."""
    if not num_windows(corpus_part, seq_len):
        return np.empty((0, seq_len + 1), dtype=corpus_part.dtype)
    return np.lib.stride_tricks.sliding_window_view(corpus_part, seq_len + 1)[::seq_len]


def _to_tensors(windows_w: Tokens, indices: NDArray[np.int64], device: torch.device) -> tuple[Tensor, Tensor]:
    tokens_bt = windows_w[indices]
    pair = (np.array(part, dtype=np.int64, order="C") for part in (tokens_bt[:, :-1], tokens_bt[:, 1:]))
    inputs_bt, targets_bt = (torch.from_numpy(part).to(device) for part in pair)
    return inputs_bt, targets_bt
