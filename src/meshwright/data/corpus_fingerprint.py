"""One hash for a tokenised corpus: the same on every machine for the same tokens, whatever file held them."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


class Fingerprint:
    """SHA-256 of the tokens, little-endian and in order, then of their type and where validation begins."""

    def __init__(self, dtype: np.dtype[np.integer]) -> None:
        self._dtype = dtype.newbyteorder("<")
        self._hash = hashlib.sha256()

    def update(self, tokens: NDArray[np.integer]) -> None:
        """Take in the next tokens, 1-D."""
        self._hash.update(np.ascontiguousarray(tokens, dtype=self._dtype).data)

    def hexdigest(self, *, num_train: int) -> str:
        """The fingerprint of a corpus whose first `num_train` tokens are trained on."""
        whole = self._hash.copy()
        whole.update(f"{self._dtype.str} {num_train}".encode("ascii"))
        return whole.hexdigest()
