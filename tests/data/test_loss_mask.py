"""Loss masks: a bit per token, whatever the chunks that it is written in and the ranges that are asked for."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data import token_cache
from meshwright.data.token_cache import LossMask, MaskWriter, check_written
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
