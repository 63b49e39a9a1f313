"""Windows tile their stream; those of several sources are those of each, numbered source by source."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.loader import IGNORED_TARGET
from meshwright.data.windows import JoinedWindows, TokenWindows, num_windows
from tests.data.test_packed_windows import open_windows


@given(length=st.integers(0, 500), seq_len=st.integers(1, 60))
def test_windows_tile_the_inputs(length, seq_len):
    count = num_windows(np.zeros(length, dtype=np.uint8), seq_len)
    assert count >= 0
    assert count == 0 or (count - 1) * seq_len + seq_len + 1 <= length
    assert count * seq_len + seq_len + 1 > length, "another window would fit"


SOURCES = {
    "streams": [
        TokenWindows(np.arange(size * 8 + 1, dtype=kind), 8) for size, kind in ((3, "<u2"), (1, ">i4"), (8, "<i8"))
    ],
    "packed": [open_windows(lengths, 8) for lengths in ((5, 9, 30, 2), (3, 3, 3), (17, 8, 8, 40, 3))],
}


@pytest.mark.parametrize("kind", SOURCES)
@given(data=st.data())
def test_a_window_is_that_of_its_source_with_its_documents(kind, data):
    sources = SOURCES[kind]
    joined = JoinedWindows(sources)
    numbered = [(source, window) for source in sources for window in range(source.num_windows)]
    assert (joined.num_windows, joined.seq_len) == (len(numbered), 8)
    windows = data.draw(st.lists(st.integers(0, len(numbered) - 1), min_size=1, max_size=20))
    rows = np.array(windows, dtype=np.int64)
    inputs, targets = joined.read(rows, ignored_target=IGNORED_TARGET)
    documents = joined.documents(rows)
    for row, window in enumerate(windows):
        source, local = numbered[window][0], np.array([numbered[window][1]])
        expected = source.read(local, ignored_target=IGNORED_TARGET)
        assert (inputs[row] == expected[0][0]).all() and (targets[row] == expected[1][0]).all()
        assert documents is None if kind == "streams" else documents[row] == source.documents(local)[0]
    assert joined.count(rows) == (targets != IGNORED_TARGET).sum()
