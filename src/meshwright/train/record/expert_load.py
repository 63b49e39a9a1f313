"""Load of mixture-of-experts layers: statistics of a step, and counts over a run.

The load of an expert is its number of tokens relative to the mean over the experts of its layer: 1 if balanced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_COUNTS_PER_STEP = 1024
"""Counts, one per layer and expert, up to which every step's line in `metrics.jsonl` has all of them."""

Counts = Sequence[Sequence[int]]
"""Tokens per layer and expert."""


@dataclass(frozen=True)
class LoadSummary:
    """Balance of the experts in a step."""

    max_over_mean: float | None
    """Largest load of an expert in any layer; None if no layer got tokens."""
    unused: int
    """Number of experts without tokens, in all layers."""


def summarize_load(counts: Counts) -> LoadSummary:
    """Return the balance of the experts in a step."""
    largest = (max(layer) * len(layer) / sum(layer) for layer in counts if any(layer))
    return LoadSummary(max(largest, default=None), sum(count == 0 for layer in counts for count in layer))


def has_full_counts(counts: Counts, *, step: int, last: int, every: int) -> bool:
    """Return whether a step's metrics contain all counts: always if they are few, else like plain progress lines.

    Args:
        counts: counts of the step.
        step: number of the step, from 1.
        last: number of the run's last step.
        every: interval for large models.
    """
    return sum(map(len, counts)) <= MAX_COUNTS_PER_STEP or step % every == 0 or step in (1, last)


@dataclass(frozen=True)
class LoadHistory:
    """Expert loads over a run, in bins of consecutive steps."""

    steps: NDArray[np.int64]
    """[bins]: last step of each bin."""
    loads: NDArray[np.float32]
    """[experts of all layers, bins]: load in each bin; NaN if the layer got no tokens."""


def read_history(lines: Iterable[dict[str, Any]], num_experts: Sequence[int], *, max_bins: int) -> LoadHistory | None:
    """Return the loads in the lines of a metrics file, or None if no line has counts.

    Args:
        lines: lines of the file.
        num_experts: number of experts of each layer; counts of other numbers are ignored.
        max_bins: maximum number of bins; even, since bins are merged in pairs.
    """
    bins = _Bins(max_bins)
    for line in lines:
        counts = line.get("expert_counts", [])
        if [len(layer) for layer in counts] == list(num_experts):
            bins.add(line["step"], np.concatenate([np.asarray(layer, np.float32) for layer in counts]))
    if not bins.totals:
        return None
    totals = np.stack(bins.totals, axis=1)
    layers = np.split(totals, np.cumsum(num_experts)[:-1])
    with np.errstate(invalid="ignore"):
        loads = np.concatenate([layer / layer.mean(axis=0) for layer in layers])
    return LoadHistory(np.array(bins.steps), loads)


class _Bins:
    """Sums over bins of equally many lines, whose size doubles when there are too many."""

    def __init__(self, max_bins: int) -> None:
        self._max_bins = max_bins
        self._size, self._in_last = 1, 0
        self.steps: list[int] = []
        self.totals: list[NDArray[np.float32]] = []

    def add(self, step: int, counts: NDArray[np.float32]) -> None:
        """Add the counts of the next line."""
        if self.totals and self._in_last < self._size:
            self.steps[-1], self.totals[-1] = step, self.totals[-1] + counts
            self._in_last += 1
            return
        if len(self.totals) == self._max_bins:
            self.steps = self.steps[1::2]
            self.totals = [a + b for a, b in zip(self.totals[::2], self.totals[1::2], strict=True)]
            self._size *= 2
        self.steps.append(step)
        self.totals.append(counts)
        self._in_last = 1
