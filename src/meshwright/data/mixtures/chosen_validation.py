"""Choose the windows of a validation: of several sources in proportion to their weights, evenly spread over each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from meshwright.data.loader import validation_windows
from meshwright.data.mixtures.entries import ONE
from meshwright.data.token_windows import Int64Array


def chosen_validation(sizes: Sequence[int], shares: Sequence[int], num_samples: int) -> Int64Array:
    """Return the windows used for validation, numbered source by source.

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
