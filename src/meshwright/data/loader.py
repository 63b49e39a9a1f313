"""Batches of corpus windows as tensors on a device.

Shapes: b samples, t tokens of a sample (seq_len).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.data.mixtures.joined_windows import Windows
from meshwright.data.sampler import SampleOrder

IGNORED_TARGET = -100
"""Target of ignored tokens, the default `ignore_index` of `torch.nn.functional.cross_entropy`."""


class Loader:
    """Random-access loader of a run's samples; it keeps no position, so it has no state to save.

    Args:
        windows: windows of this split, of one source or of several.
        order: order of all windows in this split.
        device: device of the batches.
    """

    def __init__(self, windows: Windows, order: SampleOrder, device: torch.device) -> None:
        assert order.num_windows == windows.num_windows, "the order does not match the corpus"
        self.order = order
        self._windows = windows
        self._device = device

    def batch(self, samples: range) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the samples, in order: `inputs_bt` and `targets_bt`, both int64."""
        inputs_bt, targets_bt = self.host_batch(samples)
        return inputs_bt.to(self._device), targets_bt.to(self._device)

    def host_batch(self, samples: range) -> tuple[Tensor, Tensor]:
        """Return `inputs_bt` and `targets_bt` like `batch`, but on the CPU; callable from any thread."""
        return read_tensors(self._windows, self.order.windows(samples), torch.device("cpu"))


def validation_batches(
    windows: Windows,
    chosen: NDArray[np.int64],
    *,
    batch_size: int,
    data_parallel: int,
    data_index: int,
    device: torch.device,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the validation batches of one data-parallel rank.

    The samples are the same at every validation and on every layout; each rank gets a contiguous block of them. All
    ranks get the same number of batches of the same shape, so that collectives and pipeline transfers match: batches
    are padded with rows whose targets are all `IGNORED_TARGET`. Sum and count the losses of the other tokens, and
    divide after reducing both over the ranks.

    Args:
        windows: windows of the validation split, of one source or of several.
        chosen: windows that are used, in order, over all ranks.
        batch_size: rows per batch, padding included.
        data_parallel: number of data-parallel ranks.
        data_index: data-parallel index of this rank.
        device: device of the batches.

    Yields:
        `inputs_bt` and `targets_bt`, both int64.
    """
    shares = validation_shares(chosen, batch_size=batch_size, data_parallel=data_parallel, data_index=data_index)
    for rows, num_real in shares:
        inputs_bt, targets_bt = read_tensors(windows, rows, device)
        targets_bt[num_real:] = IGNORED_TARGET
        yield inputs_bt, targets_bt


def validation_shares(
    chosen: NDArray[np.int64], *, batch_size: int, data_parallel: int, data_index: int
) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Yield the windows of each validation batch of one data-parallel rank, and how many of them are not padding."""
    first, last = (len(chosen) * index // data_parallel for index in (data_index, data_index + 1))
    num_rows = -(-len(chosen) // data_parallel)
    for start in range(0, num_rows, batch_size):
        local = chosen[first + start : min(first + start + batch_size, last)]
        padding = np.zeros(batch_size - len(local), dtype=np.int64)
        yield np.concatenate([local, padding]), len(local)


def validation_windows(num_windows: int, num_samples: int) -> NDArray[np.int64]:
    """Return the windows used for validation: `num_samples` of them, ascending and evenly spread, or all."""
    count = min(num_samples, num_windows)
    return np.arange(count, dtype=np.int64) * num_windows // max(1, count)


def read_tensors(windows: Windows, rows: NDArray[np.int64], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of windows as tensors on a device: `inputs_bt` and `targets_bt`, both int64."""
    inputs_bt, targets_bt = windows.read(rows, ignored_target=IGNORED_TARGET)
    return torch.from_numpy(inputs_bt).to(device), torch.from_numpy(targets_bt).to(device)
