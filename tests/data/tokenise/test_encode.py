"""Batches: the same tokens wherever texts are cut and however many cores encode them, and bounded memory."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data import tokenise as batches_module
from meshwright.data.sources.source_text import Continued
from meshwright.data.tokenise import AHEAD, AT_ONCE, batches, encode, encode_in_order
from meshwright.data.tokenizer import ByteTokenizer
from meshwright.data.tokenizer_files import Framing
from meshwright.errors import DataError

TEXT = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=6)
TIMEOUT_S = 120
DOCUMENTS = st.lists(st.lists(TEXT, min_size=1, max_size=3), min_size=1, max_size=20)
"""Documents in pieces."""


class WithoutEnd(ByteTokenizer):
    framing = Framing()


class Framed(ByteTokenizer):
    framing = Framing(begin=(1, 2), end=(3,))


class Failing(ByteTokenizer):
    def encode_batch(self, texts):
        if "bad" in texts:
            raise DataError("it fails on a text")
        return super().encode_batch(texts)


def in_pieces(documents):
    for pieces in documents:
        yield from (Continued(piece) for piece in pieces[:-1])
        yield pieces[-1]


def use_cores(patch, number):
    patch.setattr(os, "sched_getaffinity", lambda _: set(range(number)))


@given(documents=DOCUMENTS, batch_chars=st.integers(1, 30), cores=st.integers(1, 4), number=st.integers(0, 2))
def test_neither_batches_nor_cores_change_the_tokens(documents, batch_chars, cores, number):
    kind, begin, end = [(ByteTokenizer, b"", b"\0"), (WithoutEnd, b"", b""), (Framed, b"\1\2", b"\3")][number]
    tokenizer = kind()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches_module, "_BATCH_CHARS", batch_chars)
        use_cores(patch, cores)
        found = list(encode_in_order(batches(in_pieces(documents)), tokenizer))
    texts = [begin + "".join(pieces).encode() + end for pieces in documents]
    assert b"".join(one.tokens.tobytes() for one in found) == b"".join(texts)
    starts = np.cumsum([0, *(len(one.tokens) for one in found)])
    ends = [int(end) + start for one, start in zip(found, starts[:-1], strict=True) for end in one.ends]
    assert ends == np.cumsum([len(text) for text in texts]).tolist()
    assert sum(one.text_bytes for one in found) == sum(len(text) - len(begin) for text in texts)


def test_the_digest_is_of_the_texts_and_of_where_documents_end():
    texts = (["ab", "c"], ["a", "bc"], ["abc"], [Continued("ab"), "c"], [Continued("a"), "bc"], ["ab", "d"])
    found = [next(batches(one)) for one in texts]
    digests = [encode(one, ByteTokenizer()).texts_sha256 for one in found]
    assert digests == [one.digest() for one in found] and len(set(digests)) == len(texts)


@pytest.mark.parametrize("cores", [1, 3, 64])
def test_few_batches_are_read_ahead(monkeypatch, cores):
    use_cores(monkeypatch, cores)
    read = []

    def endless():
        while True:
            read.append(len(read))
            yield batches_module.Batch([f"document {len(read)}"], [True])

    found = encode_in_order(endless(), ByteTokenizer())
    for number in range(1, 50):
        assert bytes(next(found).tokens) == f"document {number}\0".encode()
        assert len(read) <= number + min(cores, AT_ONCE) * AHEAD
    found.close()


def test_batches_are_encoded_at_once(monkeypatch):
    use_cores(monkeypatch, 3)
    three = threading.Barrier(3, timeout=TIMEOUT_S)

    class Meeting(ByteTokenizer):
        def encode_batch(self, texts):
            three.wait()  # Fewer than three at once would wait in vain.
            return super().encode_batch(texts)

    monkeypatch.setattr(batches_module, "_BATCH_CHARS", 1)
    assert len(list(encode_in_order(batches(["text"] * 12), Meeting()))) == 12


@pytest.mark.parametrize("number", [0, 3, 9])
def test_an_error_of_the_tokenizer_is_raised_where_it_belongs(monkeypatch, number):
    use_cores(monkeypatch, 2)
    texts = ["fine"] * 10
    texts[number] = "bad"
    found = encode_in_order((batches_module.Batch([text], [True]) for text in texts), Failing())
    for _ in range(number):
        assert bytes(next(found).tokens) == b"fine\0"
    with pytest.raises(DataError, match="it fails"):
        next(found)


def test_an_error_of_the_source_is_raised():
    def broken():
        yield batches_module.Batch(["fine"], [True])
        raise DataError("line 2 is not JSON")

    with pytest.raises(DataError, match="line 2"):
        list(encode_in_order(broken(), ByteTokenizer()))
