"""Corpus fingerprints: independent of storage and chunking, sensitive to tokens and split, and pinned."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.token_cache import Fingerprint

IDS = [0, 1, 258, 65535]


def fingerprint(*chunks, dtype="<u2", num_train=3):
    whole = Fingerprint(np.dtype(dtype))
    for chunk in chunks:
        whole.update(np.array(chunk, dtype=dtype))
    return whole.hexdigest(num_train=num_train)


def test_it_is_the_hash_that_checkpoints_have_stored():
    """SHA-256 of the little-endian tokens, their type and where validation begins."""
    data = bytes([0, 0, 1, 0, 2, 1, 255, 255]) + b"<u2 3"
    assert fingerprint(IDS) == hashlib.sha256(data).hexdigest()
    assert fingerprint(IDS) == fingerprint(IDS, dtype=">u2")


@given(cut=st.integers(0, 4))
def test_chunks_do_not_matter(cut):
    assert fingerprint(IDS[:cut], IDS[cut:]) == fingerprint(IDS)


def test_tokens_type_and_division_matter():
    variants = [fingerprint(IDS), fingerprint(IDS, num_train=2), fingerprint(IDS, dtype="<u4"), fingerprint(IDS[::-1])]
    assert len(set(variants)) == len(variants)


def test_a_view_with_strides_is_read_in_order():
    strided = Fingerprint(np.dtype("<u2"))
    strided.update(np.array([0, 9, 1, 9, 258, 9, 65535, 9], dtype="<u2")[::2])
    assert strided.hexdigest(num_train=3) == fingerprint(IDS)
