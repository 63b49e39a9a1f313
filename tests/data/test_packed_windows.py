"""Packed windows: every pair in one piece, few windows, each target once in its document, and the index survives."""

from __future__ import annotations

import io
import itertools
import os
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data import packed_windows
from meshwright.data.packed_windows import (
    PIECE,
    IndexMetadata,
    PackedWindows,
    best_fit_decreasing,
    buckets,
    open_packed,
    pack,
    ranges,
    split_documents,
    write_index,
)
from meshwright.data.token_cache import SplitDocuments

seq_lens = st.integers(1, 40)
document_lengths = st.lists(st.integers(0, 100), max_size=60)


def pieces_of(lengths, seq_len):
    lengths = np.array(lengths, dtype=np.int64)
    return split_documents(np.cumsum(lengths) - lengths, lengths, seq_len)


def one_by_one(lengths, room):
    """Best-fit decreasing as in the textbook: the used room of each window."""
    used = []
    for length in sorted(lengths, reverse=True):
        fitting = [number for number, load in enumerate(used) if load + length <= room]
        if fitting:
            used[max(fitting, key=used.__getitem__)] += length
        else:
            used.append(length)
    return used


def fits(lengths, room, num_windows):
    """Whether the windows suffice, by trying all assignments."""
    for assignment in itertools.product(range(num_windows), repeat=len(lengths)):
        loads = Counter()
        for window, length in zip(assignment, lengths, strict=True):
            loads[window] += length
        if all(load <= room for load in loads.values()):
            return True
    return False


@given(lengths=document_lengths, seq_len=seq_lens)
def test_every_pair_is_in_one_piece(lengths, seq_len):
    ends = np.cumsum([0, *lengths])
    pairs = [(token, token + 1) for a, b in itertools.pairwise(ends.tolist()) for token in range(a, b - 1)]
    pieces = pieces_of(lengths, seq_len)
    found = [(start + i, start + i + 1) for start, length in pieces.tolist() for i in range(length)]
    assert found == pairs
    assert all(1 <= length <= seq_len for length in pieces["length"].tolist())
    for length in lengths:
        sizes = pieces_of([length], seq_len)["length"].tolist()
        assert all(size == seq_len for size in sizes[:-1]), "only the last piece of a document is short"


@given(lengths=st.lists(st.integers(1, 40), max_size=80), room=st.integers(40, 60))
def test_as_good_as_one_by_one(lengths, room):
    windows, num_windows = best_fit_decreasing(np.array(lengths, dtype=np.int64), room)
    used = np.bincount(windows, weights=lengths, minlength=num_windows) if lengths else np.zeros(0)
    assert sorted(used.tolist()) == sorted(one_by_one(lengths, room))


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(1, 12), max_size=5))
def test_near_the_fewest_windows(lengths):
    _, num_windows = best_fit_decreasing(np.array(lengths, dtype=np.int64), 12)
    fewest = next(count for count in itertools.count() if fits(lengths, 12, count))
    assert num_windows <= 11 / 9 * fewest + 6 / 9


@given(lengths=document_lengths, seq_len=seq_lens)
def test_windows_hold_all_pieces_and_are_filled(lengths, seq_len):
    pieces = pieces_of(lengths, seq_len)
    packed, num_pieces = pack(pieces, seq_len)
    assert Counter(packed.tolist()) == Counter(pieces.tolist())
    assert num_pieces.sum() == len(packed) and (num_pieces > 0).all()
    windows = np.split(packed, np.cumsum(num_pieces)[:-1]) if len(packed) else []
    loads = sorted(int(window["length"].sum()) for window in windows)
    assert not loads or loads[-1] <= seq_len
    assert all(2 * load > seq_len for load in loads[1:]), "at most one window is half empty"
    starts = [window["start"].tolist() for window in windows]
    assert all(window == sorted(window) for window in starts)
    assert starts == sorted(starts), "windows are in the order of their first pieces"


@given(lengths=document_lengths, seq_len=seq_lens, max_pieces=st.integers(1, 20))
def test_buckets_are_all_documents_and_bounded(lengths, seq_len, max_pieces):
    lengths = np.array(lengths, dtype=np.int64)
    found = list(buckets(lengths, seq_len, max_pieces=max_pieces))
    assert [i for bucket in found for i in range(bucket.start, bucket.stop)] == list(range(len(lengths)))
    for bucket in found:
        assert bucket.stop - bucket.start == 1 or len(pieces_of(lengths[bucket], seq_len)) <= max_pieces


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9))))
def test_ranges(pairs):
    starts, lengths = (np.array([pair[i] for pair in pairs], dtype=np.int64) for i in (0, 1))
    assert ranges(starts, lengths).tolist() == [a + i for a, n in pairs for i in range(n)]


def test_steps_grow_with_the_lengths_and_not_with_the_documents(monkeypatch):
    steps = Counter()

    class Counting(packed_windows._OpenWindows):
        def least_room(self, length):
            steps[size] += 1
            return super().least_room(length)

    monkeypatch.setattr(packed_windows, "_OpenWindows", Counting)
    for size in (10_000, 100_000):
        best_fit_decreasing(np.random.default_rng(0).integers(1, 65, size), 64)
    assert steps[100_000] < 2 * steps[10_000] < 2000


@pytest.mark.parametrize("seq_len", [1, 7, packed_windows.MAX_SEQ_LEN])
def test_places_beyond_32_bits(seq_len):
    pieces = split_documents(np.array([2**40]), np.array([10]), seq_len)
    assert pieces["start"][0] == 2**40 and pieces["start"].dtype == np.int64
    assert pieces["length"].sum() == 9


IGNORED = -7
corpora = st.lists(st.integers(0, 60), min_size=1, max_size=40)


def make_documents(lengths, split_start=0):
    return SplitDocuments(np.cumsum(lengths, dtype=np.uint64) + np.uint64(split_start), split_start)


def open_windows(lengths, seq_len, *, split_start=0, bucket_pieces=2**20):
    """Windows over tokens that tell their place, from an index in memory."""
    file = io.BytesIO()
    found = write_index(file, make_documents(lengths, split_start), seq_len, bucket_pieces=bucket_pieces)
    data, size = file.getvalue(), found.num_pieces * PIECE.itemsize
    assert len(data) == found.payload_bytes
    first = np.frombuffer(data[size:], dtype="<i8")
    assert len(first) == found.num_windows + 1
    tokens = np.arange(1, sum(lengths) + 1, dtype=np.uint32)
    return PackedWindows(tokens, seq_len, found.num_targets, np.frombuffer(data[:size], PIECE), first)


def targets_of(lengths):
    """Input and target of all pairs of all documents, for tokens that tell their place."""
    ends = np.cumsum([1, *lengths]).tolist()
    return Counter((token, token + 1) for a, b in itertools.pairwise(ends) for token in range(a, b - 1))


@given(lengths=corpora, seq_len=st.integers(1, 30), bucket_pieces=st.integers(1, 50), split_start=st.integers(0, 2**40))
def test_an_epoch_has_every_target_once_in_its_document(lengths, seq_len, bucket_pieces, split_start):
    windows = open_windows(lengths, seq_len, split_start=split_start, bucket_pieces=bucket_pieces)
    every = np.arange(windows.num_windows)
    inputs, targets = windows.read(every, ignored_target=IGNORED)
    assert inputs.dtype == targets.dtype == np.int64
    assert inputs.shape == targets.shape == (windows.num_windows, seq_len)
    real = targets != IGNORED
    assert Counter(zip(inputs[real].tolist(), targets[real].tolist(), strict=True)) == targets_of(lengths)
    assert (inputs[~real] == 0).all()
    assert windows.num_targets == windows.count(every) == real.sum()
    for row, sizes in enumerate(windows.documents(every)):
        assert sum(sizes) == seq_len and min(sizes) > 0
        bounds = np.cumsum([0, *sizes])
        for first, last in itertools.pairwise(bounds.tolist()):
            kinds = set(real[row, first:last].tolist())
            assert len(kinds) == 1, "padding is a document of its own"
            if kinds == {False}:
                assert last == seq_len, "padding is last"
            else:  # Consecutive tokens of one document: each input but the first is the target before.
                assert inputs[row, first + 1 : last].tolist() == targets[row, first : last - 1].tolist()


@given(lengths=corpora, seq_len=st.integers(1, 30), data=st.data())
def test_random_access(lengths, seq_len, data):
    windows = open_windows(lengths, seq_len)
    numbers = st.lists(st.integers(0, max(0, windows.num_windows - 1)), max_size=5 if windows.num_windows else 0)
    chosen = np.array(data.draw(numbers), dtype=np.int64)
    every = np.arange(windows.num_windows)
    for some, whole in zip(
        windows.read(chosen, ignored_target=IGNORED), windows.read(every, ignored_target=IGNORED), strict=True
    ):
        np.testing.assert_array_equal(some, whole[chosen])
    assert windows.documents(chosen) == tuple(windows.documents(every)[window] for window in chosen)
    assert windows.count(chosen) == sum(windows.count(chosen[i : i + 1]) for i in range(len(chosen)))


@settings(max_examples=15)
@given(lengths=st.lists(st.integers(2, 200), min_size=200, max_size=300), seq_len=st.integers(100, 300))
def test_fill(lengths, seq_len):
    windows = open_windows(lengths, seq_len)
    assert windows.num_windows <= -(-windows.num_targets // seq_len) * 11 / 9 + 4
    assert windows.fill == windows.num_targets / (windows.num_windows * seq_len) > 0.5


def test_short_documents_fill_windows():
    windows = open_windows(np.random.default_rng(0).integers(1, 100, 20_000), 128)
    assert windows.fill > 0.995


class Unreadable:
    """Tokens that must not be read."""

    def __getitem__(self, _):
        raise AssertionError("tokens were read")


def test_documents_and_counts_read_no_tokens():
    windows = open_windows([5, 9, 30, 2], 8)
    blind = PackedWindows(Unreadable(), 8, windows.num_targets, windows.pieces, windows.first_pieces)
    every = np.arange(windows.num_windows)
    assert blind.documents(every) == windows.documents(every) and blind.count(every) == 4 + 8 + 29 + 1


class Counting(np.ndarray):
    """Documents' ends that count how many of them are read at once."""

    most = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        Counting.most = max(Counting.most, np.size(found))
        return found


def test_memory_is_bounded_by_a_bucket(monkeypatch):
    sizes = []
    pack = packed_windows.pack
    monkeypatch.setattr(packed_windows, "pack", lambda pieces, n: (sizes.append(len(pieces)), pack(pieces, n))[1])
    documents = make_documents(np.full(1000, 20))
    counted = SplitDocuments(documents.ends.view(Counting), 0)
    write_index(io.BytesIO(), counted, 8, bucket_pieces=30)
    assert sum(sizes) == 3000 and max(sizes) <= 30
    assert Counting.most <= 30


@pytest.fixture
def opened(tmp_path):
    """Opens a packed index in the test's own directory."""

    def open_it(seq_len=8, fingerprint="f" * 64, lengths=(5, 9, 30, 2)):
        tokens = np.arange(sum(lengths))
        documents = replace(make_documents(lengths), fingerprint=fingerprint)
        return open_packed(tokens, documents, seq_len=seq_len, cache_dir=str(tmp_path))

    return open_it


def test_the_index_is_built_once_and_mapped(tmp_path, opened, monkeypatch):
    built = opened()
    monkeypatch.setattr(packed_windows, "write_index", lambda *_: pytest.fail("built again"))
    again = opened()
    for name in ("pieces", "first_pieces"):
        np.testing.assert_array_equal(getattr(built, name), getattr(again, name))
        assert not getattr(again, name).flags.writeable
    assert again.num_targets == built.num_targets and len(os.listdir(tmp_path)) == 1


def test_another_corpus_or_length_has_another_index(tmp_path, opened):
    opened()
    opened(seq_len=9)
    opened(fingerprint="e" * 64)
    assert len(os.listdir(tmp_path)) == 3


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[12:], lambda data: data + b"x"])
def test_a_damaged_index_is_built_again(tmp_path, opened, damage, caplog):
    opened()
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    opened()
    assert path.read_bytes() == whole and "damaged" in caplog.text


def test_the_index_is_the_same_bytes_everywhere(tmp_path, opened):
    """A change of these bytes changes the samples of runs: then increment `packing.FORMAT`."""
    opened(lengths=(5, 9, 30, 2, 1, 0, 17, 8, 8))
    (path,) = tmp_path.iterdir()
    windows = opened(lengths=(5, 9, 30, 2, 1, 0, 17, 8, 8))
    assert windows.pieces.tolist() == [
        (0, 4), (5, 8), (14, 8), (22, 8), (30, 8), (38, 5), (44, 1), (64, 7), (47, 8), (55, 8), (72, 7)
    ]  # fmt: skip
    assert windows.first_pieces.tolist() == [0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11]


def test_contradicting_metadata_is_refused():
    with pytest.raises(ValueError, match="pieces"):
        IndexMetadata(num_windows=1, num_pieces=1, num_targets=1, payload_bytes=1)


def test_documents_without_targets_make_no_window(opened):
    windows = opened(lengths=(1, 0, 1))
    assert windows.num_windows == 0 and windows.num_targets == 0 and windows.fill == 0
    assert windows.documents(np.empty(0, dtype=np.int64)) == ()
