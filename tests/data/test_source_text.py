"""Long text files: read piece by piece, they are the documents that they are when read at once."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.data import tokenizer as tokenizer_module
from meshwright.data.sources import source_text as pieces_module
from meshwright.data.sources.source_text import Continued, read_pieces
from meshwright.data.text_documents import Document, Extent, TextSlice
from meshwright.errors import DataError

SMALL = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
LINES = st.lists(st.text("ab é漢🙂\r\u2028\0"[:-1], max_size=12), max_size=30).map("\n".join)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Files are long from four characters on, read a few bytes at a time, and pieces have ten characters or more."""
    monkeypatch.setattr(pieces_module, "_LONG_CHARS", 3)
    monkeypatch.setattr(pieces_module, "_READ_BYTES", 7)
    monkeypatch.setattr(tokenizer_module, "_PIECE_CHARS", 10)


def slice_of(path, extent):
    return TextSlice(Document(str(path), path.name, path.stat().st_size, 0), extent)


@SMALL
@given(text=LINES, extent=st.sampled_from(Extent))
def test_the_pieces_are_the_text_and_those_of_the_whole_text(tmp_path, text, extent):
    path = tmp_path / "long.txt"
    path.write_bytes(text.encode())
    end = len(text) - len(text) // 10
    expected = {Extent.FULL: text, Extent.HEAD: text[:end], Extent.TAIL: text[end:]}[extent]
    found = list(read_pieces(slice_of(path, extent), source="x"))
    assert all(isinstance(piece, Continued) for piece in found[:-1])
    assert all(isinstance(piece, str) for piece in found[-1:])
    texts = [piece if isinstance(piece, str) else piece.text for piece in found]
    assert texts == (list(tokenizer_module.pieces([expected])) if expected else [])


@SMALL
@given(data=st.binary(max_size=40))
def test_what_is_no_text_is_none(tmp_path, data):
    path = tmp_path / "long.txt"
    path.write_bytes(data)
    try:
        is_text = b"\0" not in data and data.decode("utf-8") is not None
    except UnicodeDecodeError:
        is_text = False
    if not data.startswith((b"\xff\xfe", b"\xfe\xff")):  # which is named
        assert (read_pieces(slice_of(path, Extent.FULL), source="x") is not None) == is_text


@pytest.mark.parametrize("data", [b"a" * 50 + b"\0", b"a" * 50 + "é".encode()[:1], b"a" * 50 + b"\xff"])
def test_damage_at_the_end_is_found_before_anything_is_used(tmp_path, data):
    path = tmp_path / "long.txt"
    path.write_bytes(data)
    assert read_pieces(slice_of(path, Extent.HEAD), source="x") is None


def test_a_file_that_is_gone_is_an_error(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_pieces(TextSlice(Document(str(tmp_path / "gone.txt"), "gone.txt", 100, 0), Extent.FULL), source="x")
