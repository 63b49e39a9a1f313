"""Fingerprint of a tokenised corpus, independent of the machine and of the file that holds the tokens."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from meshwright.data import packing


class Fingerprint:
    """Incremental SHA-256 of the tokens (little-endian, in order), their dtype, and the start of validation."""

    def __init__(self, dtype: np.dtype[np.integer]) -> None:
        self._dtype = dtype.newbyteorder("<")
        self._hash = hashlib.sha256()

    def update(self, tokens: NDArray[np.integer]) -> None:
        """Hash the next tokens, 1-D."""
        self._hash.update(np.ascontiguousarray(tokens, dtype=self._dtype).data)

    def hexdigest(self, *, num_train: int) -> str:
        """Return the fingerprint of a corpus whose first `num_train` tokens are for training."""
        digest = self._hash.copy()
        digest.update(f"{self._dtype.str} {num_train}".encode("ascii"))
        return digest.hexdigest()


def masked_fingerprint(tokens: str, mask: str) -> str:
    """Return the fingerprint of a corpus of which some tokens count, from those of its tokens and its loss mask."""
    return hashlib.sha256(f"loss mask {tokens} {mask}".encode("ascii")).hexdigest()


def packed_fingerprint(tokens: str, ends: str) -> str:
    """Return the fingerprint of a corpus whose documents are packed, from those of its tokens and documents' ends."""
    return hashlib.sha256(f"packed documents {packing.FORMAT} {tokens} {ends}".encode("ascii")).hexdigest()
