"""Tokenising: the same tokens whatever the batches and cores, little memory, and a killed process's parts are used."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data import cache_file, tokenise
from meshwright.data.sources.source_text import Continued
from meshwright.data.text_corpus import open_corpus
from meshwright.data.tokenise import AHEAD, AT_ONCE, Parts, batches, encode, encode_in_order
from meshwright.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from meshwright.data.tokenizer_files import Framing
from meshwright.errors import DataError
from meshwright_bench.tokenise.corpora import Kind, write_corpus

TEXT = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=6)
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
        patch.setattr(tokenise, "_BATCH_CHARS", batch_chars)
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
            yield tokenise.Batch([f"document {len(read)}"], [True])

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

    monkeypatch.setattr(tokenise, "_BATCH_CHARS", 1)
    assert len(list(encode_in_order(batches(["text"] * 12), Meeting()))) == 12


@pytest.mark.parametrize("number", [0, 3, 9])
def test_an_error_of_the_tokenizer_is_raised_where_it_belongs(monkeypatch, number):
    use_cores(monkeypatch, 2)
    texts = ["fine"] * 10
    texts[number] = "bad"
    found = encode_in_order((tokenise.Batch([text], [True]) for text in texts), Failing())
    for _ in range(number):
        assert bytes(next(found).tokens) == b"fine\0"
    with pytest.raises(DataError, match="it fails"):
        next(found)


def test_an_error_of_the_source_is_raised():
    def broken():
        yield tokenise.Batch(["fine"], [True])
        raise DataError("line 2 is not JSON")

    with pytest.raises(DataError, match="line 2"):
        list(encode_in_order(broken(), ByteTokenizer()))


TEXTS = [f"document {number}: " + "la " * (number % 7) for number in range(100)]
PER_PART = 10
TIMEOUT_S = 120  # A process that imports numpy and pytest takes 0.4 s, and 10 s were seen on an overloaded machine.


class Counting(ByteTokenizer):
    """Counts the texts that it encodes."""

    def __init__(self):
        self.num_texts = 0

    def encode_batch(self, texts):
        self.num_texts += len(texts)
        return super().encode_batch(texts)


def shrink(patch, *, batch_chars=1):
    """Batches of one text, parts of ten, one core."""
    patch.setattr(tokenise, "_BATCH_CHARS", batch_chars)
    patch.setattr(tokenise, "_NUM_BATCHES", PER_PART)
    patch.setattr(os, "sched_getaffinity", lambda _: {0})


@pytest.fixture
def small(monkeypatch):
    shrink(monkeypatch)


def encoded(folder, texts=TEXTS, *, stop_after=None):
    """Encode texts, all or until as many batches came; return the tokens, ends and the number of texts encoded."""
    tokenizer = Counting()
    tokens, ends, text_bytes = b"", [], 0
    found = Parts(folder, "training").encode(batches(texts), tokenizer)
    for number, one in enumerate(found):
        if number == stop_after:
            found.close()
            break
        ends += [int(end) + len(tokens) for end in one.ends]
        tokens += one.tokens.tobytes()
        text_bytes += one.text_bytes
    return (tokens, ends, text_bytes), tokenizer.num_texts


@pytest.fixture
def interrupted(tmp_path, small):
    """Folder with three parts, and what encoding it all gives."""
    whole, _ = encoded(tmp_path / "other")
    encoded(tmp_path / "parts", stop_after=35)
    assert sorted(os.listdir(tmp_path / "parts")) == [f"training-{number:06}" for number in range(3)]
    return tmp_path / "parts", whole


def test_finished_parts_are_not_tokenised_again(interrupted, caplog):
    folder, whole = interrupted
    caplog.set_level(logging.INFO)
    assert encoded(folder) == (whole, len(TEXTS) - 3 * PER_PART)
    assert "going on after 3 parts of the training split" in caplog.text
    assert encoded(folder) == (whole, 0), "and all of them are parts by now"


@pytest.mark.parametrize("place", [0, 200, -100, -1])
def test_a_damaged_part_and_those_after_it_are_tokenised_again(interrupted, place):
    folder, whole = interrupted
    data = bytearray((folder / "training-000001").read_bytes())
    data[place] ^= 1
    (folder / "training-000001").write_bytes(data)
    assert encoded(folder) == (whole, len(TEXTS) - PER_PART)
    assert encoded(folder) == (whole, 0)


def test_a_part_that_breaks_off_is_tokenised_again(interrupted):
    folder, whole = interrupted
    data = (folder / "training-000000").read_bytes()
    for size in (0, 10, len(data) - 1):
        (folder / "training-000000").write_bytes(data[:size])
        assert encoded(folder)[0] == whole


def test_parts_of_other_texts_are_not_used(interrupted, tmp_path):
    folder, _ = interrupted
    texts = [*TEXTS[:14], "another", *TEXTS[15:]]
    expected, _ = encoded(tmp_path / "another", texts)
    assert encoded(folder, texts) == (expected, len(TEXTS) - PER_PART)


def test_parts_of_a_version_with_other_batches_are_not_used(interrupted, monkeypatch):
    folder, whole = interrupted
    shrink(monkeypatch, batch_chars=50)
    assert encoded(folder) == (whole, len(TEXTS))


def test_parts_of_the_other_split_are_not_used(interrupted):
    folder, _ = interrupted
    tokenizer = Counting()
    list(Parts(folder, "validation").encode(batches(TEXTS), tokenizer))
    assert tokenizer.num_texts == len(TEXTS)


def test_parts_that_cannot_be_kept_are_said_and_not_needed(tmp_path, caplog, small):
    (tmp_path / "parts").write_text("in the way")
    assert encoded(tmp_path / "parts") == encoded(tmp_path / "other")
    assert "cannot be kept for a restart" in caplog.text


def test_a_corpus_of_less_than_a_part_keeps_none(tmp_path, small):
    encoded(tmp_path / "parts", TEXTS[: PER_PART - 1])
    assert not (tmp_path / "parts").exists()


def test_parts_of_abandoned_corpora_go_after_a_week(interrupted):
    folder, _ = interrupted
    (folder.parent / "other.parts").mkdir()
    os.utime(folder.parent / "other.parts", (1, 1))
    abandoned = folder.rename(folder.with_name("abandoned.tokens.parts"))
    for days, is_there in ((6, True), (8, False)):
        os.utime(abandoned, (time.time() - days * 24 * 3600,) * 2)
        cache_file._remove_stale(abandoned.parent)
        assert abandoned.exists() == is_there
    assert (folder.parent / "other.parts").exists(), "a folder of somebody else"


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({one: number for number, one in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    path = str(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")
    backend.save(path)
    return path


def open_texts(folder, tokenizer_path, cache="cache"):
    return open_corpus(
        str(folder / "*.txt"), tokenizer=tokenizer_path, token_dtype="uint16", cache_dir=str(folder / cache)
    )


def run_until_killed(folder, tokenizer_path, saved, kill):
    """Open the corpus, say when its second part is saved, and wait for the word to be killed."""
    patch = pytest.MonkeyPatch()
    shrink(patch)
    save = Parts._save

    def save_and_die(self, number, encoded):
        save(self, number, encoded)
        if number == 1:
            saved.set()
            assert kill.wait(TIMEOUT_S)
            os.kill(os.getpid(), signal.SIGKILL)

    patch.setattr(Parts, "_save", save_and_die)
    open_texts(folder, tokenizer_path)


def run_second(folder, tokenizer_path, waits, num_texts):
    """Open the corpus, say when another process holds the lock, and count the texts that are encoded here."""
    patch = pytest.MonkeyPatch()
    shrink(patch)
    patch.setattr(cache_file._log, "info", lambda message, *_: waits.set() if "waiting" in message else None)
    encode_batch = HuggingFaceTokenizer.encode_batch

    def counted(self, texts):
        num_texts.value += len(texts)
        return encode_batch(self, texts)

    patch.setattr(HuggingFaceTokenizer, "encode_batch", counted)
    open_texts(folder, tokenizer_path)


@pytest.mark.parametrize("second_waits", [False, True])
def test_a_run_goes_on_where_another_was_killed(tmp_path, tokenizer_path, second_waits):
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number:03}.txt").write_text(text)
    context = multiprocessing.get_context("forkserver")
    saved, kill, waits = context.Event(), context.Event(), context.Event()
    num_texts = context.Value("i", 0)
    first = context.Process(target=run_until_killed, args=(tmp_path, tokenizer_path, saved, kill))
    second = context.Process(target=run_second, args=(tmp_path, tokenizer_path, waits, num_texts))
    first.start()
    assert saved.wait(TIMEOUT_S)
    if second_waits:
        second.start()
        assert waits.wait(TIMEOUT_S)
    kill.set()
    first.join(TIMEOUT_S)
    assert first.exitcode == -signal.SIGKILL
    if not second_waits:
        second.start()
    second.join(TIMEOUT_S)
    assert second.exitcode == 0
    assert num_texts.value == len(TEXTS) - 2 * PER_PART
    (found,) = (tmp_path / "cache").glob("*.tokens")
    assert not list((tmp_path / "cache").glob("*.parts")), "they are of no use any more"
    open_texts(tmp_path, tokenizer_path, "uninterrupted")
    assert found.read_bytes() == (tmp_path / "uninterrupted" / found.name).read_bytes()


SIZES = (20_000_000, 32_000_000)
RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**18)}
"""Has glibc return memory as soon as it is freed: by default it keeps up to 100 MB or so, more for larger corpora."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Kind.ONE_FILE, Kind.JSON_LINES])
def test_memory_is_that_of_a_corpus_of_half_the_size(tmp_path, kind):
    peaks = []
    for size in SIZES:
        source, text_field = write_corpus(kind, tmp_path / f"{size}", size)
        arguments = json.dumps([source, text_field, "bytes", str(tmp_path / "cache")])
        command = [sys.executable, "-m", "meshwright_bench.tokenise.measure", arguments]
        found = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | RETURN_MEMORY)
        peaks.append(json.loads(found.stdout)["peak_bytes"])
    assert peaks[1] - peaks[0] < (SIZES[1] - SIZES[0]) / 2
