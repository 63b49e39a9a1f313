"""Windows of a stream of tokens: T inputs and, shifted by one, T targets.

Window w covers tokens w·T … w·T + T, so windows share no input, and the last target of one is the first input of the
next.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]
Tokens = NDArray[np.integer]


def num_windows(part: Tokens, seq_len: int) -> int:
    """Return the number of complete windows of `seq_len` inputs in a split."""
    return max(0, len(part) - 1) // seq_len


@dataclass(frozen=True, eq=False)
class TokenWindows:
    """Random access to the windows of a split.

    Args:
        tokens: tokens of the split, 1-D; usually memory-mapped.
        seq_len: tokens in a window, T.
    """

    tokens: Tokens = field(repr=False)
    seq_len: int

    @property
    def num_windows(self) -> int:
        """Number of windows."""
        return num_windows(self.tokens, self.seq_len)

    def read(self, windows: Int64Array, *, ignored_target: int) -> tuple[Int64Array, Int64Array]:
        """Return the inputs and targets of the windows, both [len(windows), seq_len].

        Args:
            windows: numbers of the windows, 1-D.
            ignored_target: target of padding, of which a stream has none.
        """
        rows = np.lib.stride_tricks.sliding_window_view(self.tokens, self.seq_len + 1)[:: self.seq_len][windows]
        return rows[:, :-1].astype(np.int64, order="C"), rows[:, 1:].astype(np.int64, order="C")
