"""What cache files of corpora hold: loss masks, ends of documents, and fingerprints that are pinned."""

from __future__ import annotations

import hashlib
import io
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data import token_cache
from meshwright.data.token_cache import EndsWriter, Fingerprint, LossMask, MaskWriter, check_written, map_ends
from meshwright.errors import DataError


def written(chunks):
    file, writer = io.BytesIO(), MaskWriter()
    for chunk in chunks:
        writer.add(np.array(chunk, dtype=np.bool_))
    size, digest = writer.write(file)
    assert size == len(file.getvalue())
    return LossMask(np.frombuffer(file.getvalue(), dtype=np.uint8)), digest


@given(chunks=st.lists(st.lists(st.booleans(), max_size=20), max_size=8), data=st.data())
def test_what_is_written_is_read(chunks, data):
    mask, digest = written(chunks)
    flat = [bit for chunk in chunks for bit in chunk]
    assert mask.at(np.arange(len(flat))).tolist() == flat
    assert written([flat])[1] == digest
    if not flat:
        return
    start = data.draw(st.integers(0, len(flat) - 1))
    assert replace(mask, start=start).at(np.arange(len(flat) - start)).tolist() == flat[start:]
    starts = sorted(data.draw(st.lists(st.integers(0, len(flat) - 1), max_size=5)))
    lengths = [data.draw(st.integers(0, len(flat) - one)) for one in starts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_cache, "_CHUNK_TOKENS", data.draw(st.integers(1, 40)))
        found = mask.counts(np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int64))
    assert found.tolist() == [sum(flat[a : a + n]) for a, n in zip(starts, lengths, strict=True)]


def test_a_damaged_mask_is_found(tmp_path):
    mask, digest = written([[True, False, True]])
    check_written(mask.bits, digest, "{} is damaged", tmp_path / "x")
    with pytest.raises(DataError, match="is damaged") as caught:
        check_written(mask.bits ^ 128, digest, "{} is damaged", tmp_path / "x")
    assert caught.value.fix.startswith("rm ")


def test_damaged_ends_are_found(tmp_path):
    (file := tmp_path / "x").touch()
    with file.open("wb") as out:
        ends = EndsWriter(out)
        ends.write(np.array([3, 5]))
        ends.write(np.array([9]))
    metadata = mock.Mock(payload_bytes=24, num_documents=3, ends_fingerprint=ends.fingerprint())
    assert map_ends(file, metadata).tolist() == [3, 5, 9]
    file.write_bytes(b"\x04" + file.read_bytes()[1:])
    with pytest.raises(DataError, match="damaged") as caught:
        map_ends(file, metadata)
    assert caught.value.fix.startswith("rm ")


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
