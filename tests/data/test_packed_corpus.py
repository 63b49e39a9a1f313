"""Packed corpora: both splits are packed, and too few targets are an error with a length that works."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright.data.packed_corpus import pack_corpus
from meshwright.data.text_corpus import open_corpus
from meshwright.errors import DataError
from meshwright.units import counted


def open_tokens(folder, ids):
    np.save(folder / "t.npy", np.array(ids, dtype=np.uint16))
    return open_corpus(
        str(folder / "t.npy"),
        tokenizer="bytes",
        token_dtype="uint16",
        cache_dir=str(folder),
        with_documents=True,
        separator=0,
    )


@settings(max_examples=40)
@example(ids=[0] * 18 + [1, 0], seq_len=2, tp=1)  # a single target
@given(ids=st.lists(st.integers(0, 4), min_size=20, max_size=120), seq_len=st.integers(1, 30), tp=st.integers(1, 4))
def test_the_targets_of_both_splits_are_those_of_their_documents(tmp_path_factory, ids, seq_len, tp):
    folder = tmp_path_factory.mktemp("corpus")
    corpus = open_tokens(folder, [1, 0, *ids])

    def pairs(split):
        tokens = split.tolist()
        return Counter((a, b) for a, b in zip(tokens, tokens[1:], strict=False) if a != 0)

    fewest = min(pairs(split).total() for split in (corpus.train, corpus.validation))
    if fewest < seq_len:
        with pytest.raises(DataError, match=f"have {counted(fewest, 'target')}") as caught:
            pack_corpus(corpus, seq_len=seq_len, cache_dir=str(folder), multiple_of=tp)
        found = re.match(r"train\.seq_len=(\d+)", caught.value.fix)
        assert (found is None) == (fewest < tp)
        if found:
            assert fewest - tp < int(found[1]) <= fewest and int(found[1]) % tp == 0
            pack_corpus(corpus, seq_len=int(found[1]), cache_dir=str(folder))
        return
    packed = pack_corpus(corpus, seq_len=seq_len, cache_dir=str(folder)).packed
    for windows, split in ((packed.train, corpus.train), (packed.validation, corpus.validation)):
        inputs, targets = windows.read(np.arange(windows.num_windows), ignored_target=-1)
        real = targets >= 0
        assert Counter(zip(inputs[real].tolist(), targets[real].tolist(), strict=True)) == pairs(split)


def test_the_fill_of_the_demo_corpus(tmp_path):
    corpus = open_corpus("stdlib", tokenizer="bytes", token_dtype="uint8", cache_dir=str(tmp_path), with_documents=True)
    packed = pack_corpus(corpus, seq_len=1024, cache_dir=str(tmp_path)).packed
    assert packed.train.fill > 0.999 and packed.validation.fill > 0.99
    assert packed.train.num_targets == len(corpus.train) - len(corpus.train_documents.ends)


def test_the_description_says_what_packing_is_worth(tmp_path):
    """Training has documents of 4, 2 and 1 targets in samples of 4, in two samples instead of three."""
    corpus = open_tokens(tmp_path, [1, 1, 1, 1, 0, 1, 1, 0, 1, 0, 0, *[1] * 5])
    packed = pack_corpus(corpus, seq_len=4, cache_dir=str(tmp_path))
    assert packed.description.startswith(corpus.description)
    assert "87.5% of the tokens in samples have a target, 58.3% with a document per sample" in packed.description
