"""Text corpora: every document once, no held-out text in training, and a transparent cache."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import mmap
import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.data import cache_file, tokenise
from meshwright.data.text_corpus import Corpus, check_vocab, check_windows, open_corpus
from meshwright.data.token_cache import CorpusMetadata, map_tokens
from meshwright.data.tokenizer import ByteTokenizer, open_tokenizer
from meshwright.errors import DataError


@pytest.fixture
def opened(tmp_path):
    """Opens a corpus of tmp_path/texts with its cache in the test's own directory."""
    (tmp_path / "texts").mkdir()

    def open_it(source=None, *, tokenizer="bytes", cache="cache", **documents):
        source = source or str(tmp_path / "texts" / "**" / "*.txt")
        folder = str(tmp_path / cache)
        return open_corpus(source, tokenizer=tokenizer, token_dtype="uint16", cache_dir=folder, **documents)

    return open_it


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([make_document(number) for number in range(50)], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    backend.save(str(path))
    return str(path)


def make_document(number):
    return f"document {number} — and its text\n" * (number % 5 + 1)


def write_documents(folder, count):
    """Writes `count` documents and returns their texts."""
    for number in range(count):
        (folder / f"{number}.txt").write_text(make_document(number), encoding="utf-8")
    return [make_document(number) for number in range(count)]


def pieces(part, separator=0):
    """The texts between separators."""
    cuts = np.flatnonzero(part == separator)
    assert cuts[-1] == len(part) - 1, "a separator follows every document"
    return [bytes(piece[:-1].astype(np.uint8)).decode() for piece in np.split(part, cuts + 1)[:-1]]


def corpus_of(num_train, num_validation, vocab_size=256):
    empty = np.zeros(max(num_train, num_validation), dtype=np.uint8)
    return Corpus("here", "", empty[:num_train], empty[:num_validation], vocab_size, None, "")


def test_many_files_are_each_in_one_part_whole(tmp_path, opened):
    texts = write_documents(tmp_path / "texts", 100)
    corpus = opened()
    train, validation = pieces(corpus.train), pieces(corpus.validation)
    assert sorted(train + validation) == sorted(texts)
    assert corpus.validation_bytes_per_token == 1.0 and corpus.vocab_size == 256
    assert corpus.train.dtype == np.uint8


characters = st.characters(exclude_characters="\0", codec="utf-8")


# The first text that hypothesis makes on a machine costs a second or two.
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(texts=st.lists(st.text(characters, min_size=10), min_size=1, max_size=4))
def test_few_files_are_each_in_both_parts(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_bytes(text.encode())
    corpus = open_corpus(f"{folder}/*.txt", tokenizer="bytes", token_dtype="uint8", cache_dir=str(folder / "cache"))
    heads, tails = pieces(corpus.train), pieces(corpus.validation)
    assert [head + tail for head, tail in zip(heads, tails, strict=True)] == texts
    assert [len(tail) for tail in tails] == [len(text) // 10 for text in texts]


def test_what_is_no_text_is_left_out_and_said_once(tmp_path, opened, caplog):
    texts = write_documents(tmp_path / "texts", 3)
    (tmp_path / "texts" / "latin.txt").write_bytes(b"caf\xe9" * 100)
    (tmp_path / "texts" / "zero.txt").write_bytes(b"a\0b" * 100)
    (tmp_path / "texts" / "empty.txt").write_bytes(b"")
    for _ in range(2):  # Built, then cached.
        corpus = opened()
        heads, tails = pieces(corpus.train), pieces(corpus.validation)
        assert [head + tail for head, tail in zip(heads, tails, strict=True)] == texts
        assert corpus.description.count("skipped 2 of the 6 files") == 1 and not caplog.records


@pytest.mark.parametrize("contents", [[], [b""], [b"caf\xe9", b"\0"], [b"too short"]])
def test_an_empty_part_is_an_error_and_leaves_no_cache(tmp_path, opened, contents):
    for number, data in enumerate(contents):
        (tmp_path / "texts" / f"{number}.txt").write_bytes(data)
    with pytest.raises(DataError, match="is empty|no file matches") as caught:
        opened()
    assert caught.value.where.startswith("data.source, ") and caught.value.rule
    assert not (tmp_path / "cache").exists() or os.listdir(tmp_path / "cache") == []


@pytest.mark.parametrize("count", [3, 100])
def test_cached_equals_built(tmp_path, opened, monkeypatch, count):
    write_documents(tmp_path / "texts", count)
    built = opened()
    monkeypatch.setattr(tokenise, "write_corpus", lambda *_, **__: pytest.fail("tokenised again"))
    cached = opened()
    for name in ("description", "vocab_size", "validation_bytes_per_token", "fingerprint"):
        assert getattr(cached, name) == getattr(built, name)
    for part in ("train", "validation"):
        np.testing.assert_array_equal(getattr(cached, part), getattr(built, part))
        base = getattr(cached, part)
        while isinstance(base.base, np.ndarray):
            base = base.base
        assert isinstance(base.base, mmap.mmap) and not base.flags.writeable


def test_a_changed_corpus_is_tokenised_again(tmp_path, opened, tokenizer_path):
    write_documents(tmp_path / "texts", 3)
    fingerprints = [opened().fingerprint]
    path = tmp_path / "texts" / "1.txt"
    path.write_text("X" + make_document(1)[1:], encoding="utf-8")  # The same size, at another time.
    os.utime(path, (1, 1))
    fingerprints.append(opened().fingerprint)
    path.rename(path.with_name("9.txt"))
    fingerprints.append(opened().fingerprint)
    fingerprints.append(opened(tokenizer=tokenizer_path).fingerprint)
    assert len(set(fingerprints)) == 4


def test_the_fingerprint_is_of_the_contents_alone(tmp_path, opened):
    write_documents(tmp_path / "texts", 100)
    here = opened()
    (tmp_path / "texts").rename(tmp_path / "moved")
    for path in (tmp_path / "moved").iterdir():
        os.utime(path, (1, 1))
    there = opened(str(tmp_path / "moved" / "*.txt"), cache="other")
    assert there.fingerprint == here.fingerprint


@pytest.mark.parametrize("count", [3, 100])
@pytest.mark.parametrize("batch_chars", [1, 500, 10**9])
def test_tokenised_text_is_the_text(tmp_path, opened, monkeypatch, tokenizer_path, count, batch_chars):
    texts = write_documents(tmp_path / "texts", count)
    monkeypatch.setattr(tokenise, "_BATCH_CHARS", batch_chars)
    plain, corpus = opened(), opened(tokenizer=tokenizer_path)
    tokenizer = open_tokenizer(tokenizer_path)
    assert corpus.vocab_size == 290 and corpus.train.dtype == np.uint16
    decoded = {name: tokenizer.decode(getattr(corpus, name)).split("</s>") for name in ("train", "validation")}
    for name, found in decoded.items():
        assert found == ByteTokenizer().decode(getattr(plain, name)).split("\0")
    assert sum(len(text) for part in decoded.values() for text in part) == sum(map(len, texts))
    # Bits a byte can be compared between tokenizers: the same held-out text, the same number of bytes.
    assert corpus.validation_bytes_per_token * len(corpus.validation) == pytest.approx(len(plain.validation), rel=1e-12)


def test_a_token_file_is_a_corpus(tmp_path, opened):
    ids = np.arange(1000, dtype=np.uint16)
    np.save(tmp_path / "t.npy", ids)
    corpus = opened(str(tmp_path / "t.npy"), tokenizer="/no/such/tokenizer.json")
    np.testing.assert_array_equal(np.concatenate([corpus.train, corpus.validation]), ids)
    assert len(corpus.validation) == 100 and corpus.vocab_size == 1000
    assert corpus.validation_bytes_per_token is None
    assert corpus.description == "t.npy, 900 tokens train / 100 tokens validation"


def test_a_missing_tokenizer_is_an_error_even_when_the_text_is_cached(tmp_path, opened, tokenizer_path):
    write_documents(tmp_path / "texts", 3)
    opened(tokenizer=tokenizer_path)
    with pytest.raises(DataError, match="file not found"):
        opened(tokenizer=str(tmp_path / "tokenizer.json"))


def documents_of(part, documents):
    """The documents of a split, as lists of tokens."""
    bounds = [0, *(documents.ends.astype(int) - documents.split_start)]
    return [part[first:last].tolist() for first, last in itertools.pairwise(bounds)]


@pytest.mark.parametrize("count", [3, 100])
@pytest.mark.parametrize("batch_chars", [1, 500, 10**9])
@pytest.mark.parametrize("is_bytes", [True, False])
def test_documents_are_the_texts(tmp_path, opened, monkeypatch, tokenizer_path, count, batch_chars, is_bytes):
    write_documents(tmp_path / "texts", count)
    (tmp_path / "texts" / "latin.txt").write_bytes(b"caf\xe9" * 100)
    (tmp_path / "texts" / "empty.txt").write_bytes(b"")
    monkeypatch.setattr(tokenise, "_BATCH_CHARS", batch_chars)
    corpus = opened(tokenizer="bytes" if is_bytes else tokenizer_path, with_documents=True)
    (separator,) = (0,) if is_bytes else open_tokenizer(tokenizer_path).framing.end
    for part, documents in (
        (corpus.train, corpus.train_documents),
        (corpus.validation, corpus.validation_documents),
    ):
        found = documents_of(part, documents)
        assert sum(map(len, found)) == len(part)
        assert all(ids.count(separator) == 1 and ids[-1] == separator for ids in found)


def test_documents_need_no_separator(tmp_path, opened):
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"document": 0, "other": 1}, unk_token="other"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    write_documents(tmp_path / "texts", 100)
    corpus = opened(tokenizer=str(tmp_path / "tokenizer.json"), with_documents=True)
    for part, documents in ((corpus.train, corpus.train_documents), (corpus.validation, corpus.validation_documents)):
        assert all(ids[0] == 0 for ids in documents_of(part, documents)), "each starts with the word `document`"


def without_documents(path):
    """Rewrite a cache file as earlier versions wrote it."""
    metadata = cache_file.load(path, CorpusMetadata)
    tokens = map_tokens(path, metadata).tobytes()
    fields = {key: value for key, value in dataclasses.asdict(metadata).items() if "document" not in key}
    del fields["ends_fingerprint"]
    encoded = json.dumps({**fields, "payload_bytes": len(tokens)}).encode()
    path.write_bytes(tokens + encoded + np.array(len(encoded), "<u8").tobytes() + cache_file.MAGIC)


def test_a_cache_of_an_earlier_version_serves_until_documents_are_needed(tmp_path, opened, monkeypatch):
    write_documents(tmp_path / "texts", 100)
    packed = opened(with_documents=True)
    (path,) = (tmp_path / "cache").iterdir()
    whole = path.read_bytes()
    without_documents(path)
    with monkeypatch.context() as patch:
        patch.setattr(tokenise, "write_corpus", lambda *_, **__: pytest.fail("tokenised again"))
        plain = opened()
    assert plain.train_documents is None and path.read_bytes() != whole
    np.testing.assert_array_equal(plain.train, packed.train)
    again = opened(with_documents=True)
    assert path.read_bytes() == whole and again.fingerprint == packed.fingerprint
    assert opened().fingerprint == plain.fingerprint != packed.fingerprint, "documents are part of packed corpora only"


def test_damaged_documents_are_an_error(tmp_path, opened):
    write_documents(tmp_path / "texts", 100)
    corpus = opened(with_documents=True)
    (path,) = (tmp_path / "cache").iterdir()
    with path.open("r+b") as file:
        file.seek(len(corpus.train) + len(corpus.validation) + 8)
        file.write(b"\xee")
    opened()
    with pytest.raises(DataError, match="damaged"):
        opened(with_documents=True)


def test_the_fingerprint_sees_the_documents(tmp_path, opened):
    """The same tokens with other boundaries are other samples."""
    np.save(tmp_path / "t.npy", np.tile([5, 0, 1, 5], 10))
    fingerprints = {opened(str(tmp_path / "t.npy"), with_documents=True, separator=i).fingerprint for i in (0, 1, 5)}
    assert len(fingerprints | {opened(str(tmp_path / "t.npy")).fingerprint}) == 4


@given(num_train=st.integers(0, 50), num_validation=st.integers(0, 50), tp=st.integers(1, 9))
def test_the_longest_that_fits_is_one_that_ranks_can_divide(num_train, num_validation, tp):
    corpus, longest = corpus_of(num_train, num_validation), min(num_train, num_validation) - 1
    with pytest.raises(DataError) as caught:
        check_windows(corpus, 60 * tp, multiple_of=tp)
    found = re.match(r"train\.seq_len=(\d+)", caught.value.fix)
    assert (found is None) == (longest < tp)
    if found:
        assert int(found[1]) % tp == 0 and longest - tp < int(found[1]) <= longest


@given(num_train=st.integers(0, 50), num_validation=st.integers(0, 50), seq_len=st.integers(1, 60))
def test_a_sample_longer_than_a_part_is_refused_with_the_longest_that_fits(num_train, num_validation, seq_len):
    corpus = corpus_of(num_train, num_validation)
    if min(num_train, num_validation) > seq_len:
        check_windows(corpus, seq_len)
        return
    with pytest.raises(DataError, match=f"train.seq_len = {seq_len}") as caught:
        check_windows(corpus, seq_len)
    assert "data.source, here" in caught.value.where
    if found := re.match(r"train\.seq_len=(\d+)", caught.value.fix):
        check_windows(corpus, int(found[1]))
        with pytest.raises(DataError):
            check_windows(corpus, int(found[1]) + 1)
    else:
        assert min(num_train, num_validation) <= 1


@given(vocab_size=st.integers(3, 300), excess=st.integers(-2, 2))
def test_ids_beyond_the_vocabulary_are_refused_with_one_that_works(vocab_size, excess):
    needed = vocab_size + excess
    corpus = corpus_of(10, 10, vocab_size=needed)
    if needed <= vocab_size:
        check_vocab(corpus, vocab_size)
        return
    with pytest.raises(DataError, match=f"model.vocab_size = {vocab_size}") as caught:
        check_vocab(corpus, vocab_size)
    check_vocab(corpus, int(re.match(r"model\.vocab_size=(\d+)", caught.value.fix)[1]))


def test_the_standard_library(opened, caplog, monkeypatch):
    caplog.set_level(logging.WARNING)
    built = opened("stdlib")
    monkeypatch.setattr(tokenise, "write_corpus", None)
    cached = opened("stdlib")
    assert cached.fingerprint == built.fingerprint and cached.description == built.description
    # A distribution's Python may come without its tests, a third of the text.
    assert re.fullmatch(r"standard library source, \d+\.\d MB train / \d+\.\d [kM]B validation", built.description)
    assert len(built.train) > 10e6 and 0.03 < len(built.validation) / len(built.train) < 0.3
    assert built.validation_bytes_per_token == 1.0
    both = pieces(built.train) + pieces(built.validation)
    assert both.count(Path(dataclasses.__file__).read_text("utf-8")) == 1
    assert not caplog.records
