"""Batches of windows as tensors on a device, of packed documents with their lengths, and the windows of a validation.

Shapes: b samples, t tokens of a sample (seq_len).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshwright.data.mixtures.entries import ONE
from meshwright.data.sampler import SampleOrder
from meshwright.data.windows import Documents, Int64Array, Windows

IGNORED_TARGET = -100
"""Target of ignored tokens, the default `ignore_index` of `torch.nn.functional.cross_entropy`."""


class LoadedBatch(NamedTuple):
    """Samples. Targets of padding, at the end of packed samples, and of what doesn't count are `IGNORED_TARGET`."""

    inputs: Tensor
    """int64 [b, t]."""
    targets: Tensor
    """int64 [b, t]."""
    documents: Documents | None
    """Lengths of each packed sample's documents, padding last; they add up to t."""


class Loader:
    """Random-access loader of a run's samples; it keeps no position, so it has no state to save."""

    def __init__(self, windows: Windows, order: SampleOrder, device: torch.device) -> None:
        assert order.num_windows == windows.num_windows, "the order does not match the windows"
        self.order = order
        self._windows = windows
        self._device = device

    def batch(self, samples: range) -> LoadedBatch:
        """Return the samples, in order."""
        host = self.host_batch(samples)
        return LoadedBatch(host.inputs.to(self._device), host.targets.to(self._device), host.documents)

    def host_batch(self, samples: range) -> LoadedBatch:
        """Return the samples like `batch`, but on the CPU; callable from any thread."""
        return _read(self._windows, self.order.windows(samples), torch.device("cpu"))

    def count(self, samples: range) -> int:
        """Return the number of targets in the samples, without reading tokens."""
        return self._windows.count(self.order.windows(samples))


def validation_batches(
    windows: Windows,
    chosen: Int64Array,
    *,
    batch_size: int,
    data_parallel: int,
    data_index: int,
    device: torch.device,
) -> Iterator[LoadedBatch]:
    """Yield the validation batches of one data-parallel rank.

    The samples are the same at every validation and on every layout; each rank gets a contiguous block of them. All
    ranks get the same number of batches of the same shape, so that collectives and pipeline transfers match: batches
    are padded with rows whose targets are all `IGNORED_TARGET`. Sum and count the losses of the other tokens, and
    divide after reducing both over the ranks.

    Args:
        chosen: windows that are used, in order, over all ranks.
    """
    first, last = (len(chosen) * index // data_parallel for index in (data_index, data_index + 1))
    num_rows = -(-len(chosen) // data_parallel)
    for start in range(0, num_rows, batch_size):
        local = chosen[first + start : min(first + start + batch_size, last)]
        padding = np.zeros(batch_size - len(local), dtype=np.int64)
        batch = _read(windows, np.concatenate([local, padding]), device)
        batch.targets[len(local) :] = IGNORED_TARGET
        yield batch


def validation_windows(num_windows: int, num_samples: int) -> Int64Array:
    """Return the windows used for validation: `num_samples` of them, ascending and evenly spread, or all."""
    count = min(num_samples, num_windows)
    return np.arange(count, dtype=np.int64) * num_windows // max(1, count)


def chosen_validation(sizes: Sequence[int], shares: Sequence[int], num_samples: int) -> Int64Array:
    """Return the windows of several sources used for validation, numbered source by source: in proportion to the
    sources' shares, and evenly spread over each.

    A source whose share exceeds its windows gives some of them several times, so that the loss is that of the mixture.

    Args:
        sizes: number of held-out windows of each source, at least one.
        shares: weight of each source in units of 1/ONE, which add up to ONE.
        num_samples: samples over all ranks; the windows of all sources if they have fewer.
    """
    if len(sizes) == 1:
        return validation_windows(sizes[0], num_samples)
    count = min(num_samples, sum(sizes))
    ends = [count * total // ONE for total in accumulate(shares)]
    chosen, first = [], 0
    for size, start, end in zip(sizes, [0, *ends], ends, strict=False):
        chosen.append(first + np.arange(end - start, dtype=np.int64) * size // max(1, end - start))
        first += size
    return np.concatenate(chosen)


def _read(windows: Windows, rows: Int64Array, device: torch.device) -> LoadedBatch:
    inputs, targets = windows.read(rows, ignored_target=IGNORED_TARGET)
    return LoadedBatch(
        torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device), windows.documents(rows)
    )
