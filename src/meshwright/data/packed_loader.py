"""Batches of packed windows as tensors on a device, with the documents of each sample.

Shapes: b samples, t tokens of a sample (seq_len).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.data.loader import IGNORED_TARGET, read_tensors, validation_shares
from meshwright.data.mixtures.joined_windows import JoinedPacked
from meshwright.data.packed_windows import Documents
from meshwright.data.sampler import SampleOrder


class PackedBatch(NamedTuple):
    """Packed samples. Targets of padding, at the end of samples, are `IGNORED_TARGET`."""

    inputs: Tensor
    """int64 [b, t]."""
    targets: Tensor
    """int64 [b, t]."""
    documents: Documents
    """Lengths of each sample's documents, padding last; they add up to t."""


class PackedLoader:
    """Random-access loader of a run's packed samples; it keeps no position, so it has no state to save.

    Args:
        windows: windows of this split, of one source or of several.
        order: order of all windows in this split.
        device: device of the batches.
    """

    def __init__(self, windows: JoinedPacked, order: SampleOrder, device: torch.device) -> None:
        assert order.num_windows == windows.num_windows, "the order does not match the windows"
        self.order = order
        self._windows = windows
        self._device = device

    def batch(self, samples: range) -> PackedBatch:
        """Return the samples, in order."""
        host = self.host_batch(samples)
        return PackedBatch(host.inputs.to(self._device), host.targets.to(self._device), host.documents)

    def host_batch(self, samples: range) -> PackedBatch:
        """Return the samples like `batch`, but on the CPU; callable from any thread."""
        return _read(self._windows, self.order.windows(samples), torch.device("cpu"))

    def documents(self, samples: range) -> Documents:
        """Return the lengths of the samples' documents, without reading tokens."""
        return self._windows.documents(self.order.windows(samples))

    def count(self, samples: range) -> int:
        """Return the number of targets in the samples, without reading tokens."""
        return self._windows.count(self.order.windows(samples))


def packed_validation_batches(
    windows: JoinedPacked,
    chosen: NDArray[np.int64],
    *,
    batch_size: int,
    data_parallel: int,
    data_index: int,
    device: torch.device,
) -> Iterator[PackedBatch]:
    """Yield the validation batches of one data-parallel rank, as `validation_batches` does for windows of a stream.

    Args:
        windows: windows of the validation split, of one source or of several.
        chosen: windows that are used, in order, over all ranks.
        batch_size: rows per batch, padding included; the targets of padding rows are all `IGNORED_TARGET`.
        data_parallel: number of data-parallel ranks.
        data_index: data-parallel index of this rank.
        device: device of the batches.
    """
    shares = validation_shares(chosen, batch_size=batch_size, data_parallel=data_parallel, data_index=data_index)
    for rows, num_real in shares:
        batch = _read(windows, rows, device)
        batch.targets[num_real:] = IGNORED_TARGET
        yield batch


def _read(windows: JoinedPacked, rows: NDArray[np.int64], device: torch.device) -> PackedBatch:
    return PackedBatch(*read_tensors(windows, rows, device), windows.documents(rows))
