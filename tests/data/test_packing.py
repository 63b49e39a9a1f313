"""Packing: every pair of a document in one piece, no window too full, as few windows as item-by-item best fit."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data import packed_windows
from meshwright.data.packed_windows import best_fit_decreasing, buckets, pack, ranges, split_documents

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
