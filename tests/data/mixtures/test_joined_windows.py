"""Windows of several sources are those of each, numbered source by source; a validation keeps the proportions."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.loader import IGNORED_TARGET, chosen_validation, validation_windows
from meshwright.data.mixtures.entries import ONE
from meshwright.data.windows import JoinedWindows, TokenWindows
from tests.data.test_packed_windows import open_windows

chosen = st.lists(st.integers(0, 11), max_size=30)


@given(chosen=chosen)
def test_a_window_is_that_of_its_source(chosen):
    streams = [
        TokenWindows(np.arange(size * 4 + 1, dtype=kind), 4) for size, kind in ((3, "<u2"), (1, ">i4"), (8, "<i8"))
    ]
    joined = JoinedWindows(tuple(streams))
    assert (joined.num_windows, joined.seq_len) == (12, 4)
    inputs, targets = joined.read(np.array(chosen, dtype=np.int64), ignored_target=IGNORED_TARGET)
    local = [(streams[0], w) if w < 3 else (streams[1], 0) if w == 3 else (streams[2], w - 4) for w in chosen]
    for row, (stream, window) in enumerate(local):
        expected = stream.read(np.array([window]), ignored_target=IGNORED_TARGET)
        assert (inputs[row] == expected[0][0]).all() and (targets[row] == expected[1][0]).all()


@given(data=st.data())
def test_packed_windows_keep_their_documents(data):
    sources = [open_windows(lengths, 8) for lengths in ((5, 9, 30, 2), (3, 3, 3), (17, 8, 8, 40, 3))]
    joined = JoinedWindows(tuple(sources))
    numbered = [(source, window) for source in sources for window in range(source.num_windows)]
    windows = data.draw(st.lists(st.integers(0, len(numbered) - 1), max_size=20))
    rows = np.array(windows, dtype=np.int64)
    inputs, targets = joined.read(rows, ignored_target=IGNORED_TARGET)
    documents = joined.documents(rows)
    for row, window in enumerate(windows):
        source, local = numbered[window][0], np.array([numbered[window][1]])
        expected = source.read(local, ignored_target=IGNORED_TARGET)
        assert (inputs[row] == expected[0][0]).all() and (targets[row] == expected[1][0]).all()
        assert documents[row] == source.documents(local)[0]
    assert joined.count(rows) == (targets != IGNORED_TARGET).sum()


@given(
    sizes=st.lists(st.integers(1, 500), min_size=2, max_size=5),
    weights=st.lists(st.integers(1, 50), min_size=5, max_size=5),
    num_samples=st.integers(0, 400),
)
def test_a_validation_keeps_the_proportions_and_spreads_over_each_source(sizes, weights, num_samples):
    total = sum(weights[: len(sizes)])
    ends = [round(ONE * sum(weights[: at + 1]) / total) for at in range(len(sizes))]
    shares = np.diff([0, *ends]).tolist()
    found = chosen_validation(sizes, shares, num_samples)
    assert len(found) == min(num_samples, sum(sizes)) and (np.diff(found) >= 0).all()
    first = 0
    for size, share in zip(sizes, shares, strict=True):
        own = found[(found >= first) & (found < first + size)] - first
        assert abs(len(own) * ONE - len(found) * share) < ONE
        if len(own):
            repeats = np.bincount(own, minlength=size)
            assert own[0] == 0 and repeats.max() <= -(-len(own) // size)
        first += size


def test_one_source_is_validated_as_ever():
    for size, num_samples in ((10, 3), (3, 10), (1000, 128)):
        assert (chosen_validation([size], [ONE], num_samples) == validation_windows(size, num_samples)).all()
