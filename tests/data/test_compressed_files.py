"""Compressed files and byte order marks: whatever reads a text reads what the file holds, and names damage."""

from __future__ import annotations

import bz2
import codecs
import gzip
import importlib.util
import json
import lzma
import re
import shlex
import subprocess

import numpy as np
import pytest

from meshwright.data.sources import source_text
from meshwright.data.sources.own_documents import read_texts as read_own
from meshwright.data.sources.record_field import RecordField
from meshwright.data.sources.source_text import EmptyTexts
from meshwright.data.text_corpus import open_corpus
from meshwright.data.text_documents import list_documents
from meshwright.errors import DataError

TEXTS = [f"text {number}: ä\n" * (number % 9 + 1) for number in range(60)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def zstandard(data):
    pa = pytest.importorskip("pyarrow")
    return pa.compress(data, codec="zstd", asbytes=True)


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard}


def opened(source, folder, **more):
    return open_corpus(str(source), tokenizer="bytes", token_dtype="uint8", cache_dir=str(folder / "cache"), **more)


@pytest.fixture(autouse=True)
def _short_reads(monkeypatch):
    """A read ends inside characters."""
    monkeypatch.setattr(source_text, "_READ_BYTES", 7)


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize(
    ("name", "data", "field"), [("a.jsonl", LINES, "text"), ("a.txt", "".join(TEXTS).encode(), None)]
)
def test_a_compressed_file_is_what_it_holds(tmp_path, suffix, name, data, field):
    (tmp_path / name).write_bytes(data)
    half = len(data) // 2
    (tmp_path / f"{name}{suffix.upper() if suffix == '.gz' else suffix}").write_bytes(
        COMPRESS[suffix](data[:half]) + COMPRESS[suffix](data[half:])  # members or frames one after the other
    )
    plain, packed = (opened(tmp_path / one, tmp_path, text_field=field) for one in (name, f"{name}.[gGbxz]*"))
    assert packed.fingerprint == plain.fingerprint
    assert np.array_equal(packed.validation, plain.validation) and len(plain.validation)


DAMAGES = {
    "cut short": lambda data: data[:-9],
    "changed inside": lambda data: data[:40] + b"\0" * 20 + data[60:],
    "not compressed": lambda _: LINES,
}


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize(("name", "field"), [("a.jsonl", "text"), ("a.txt", None)])
def test_a_damaged_file_is_named(tmp_path, suffix, name, field):
    path = tmp_path / f"{name}{suffix}"
    for damage, change in DAMAGES.items():
        if damage == "changed inside" and suffix == ".zst":  # pyarrow writes no checksum, which zstd does
            continue
        path.write_bytes(change(COMPRESS[suffix](LINES)))
        with pytest.raises(DataError, match=re.escape(str(path))) as caught:
            opened(path, tmp_path, text_field=field)
        assert "decompress" in caught.value.what and "fetch the file again" in caught.value.fix, damage


def test_a_compressed_file_without_a_field_shows_its_fields_and_one_that_is_away_is_said(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES))
    with pytest.raises(DataError, match="data.text_field is not set") as caught:
        opened(tmp_path / "a.jsonl.gz", tmp_path)
    assert caught.value.fix == "data.text_field=text"
    with pytest.raises(DataError, match="is a directory") as caught:
        opened(tmp_path, tmp_path)
    [suggested] = shlex.split(caught.value.fix)
    assert list_documents(suggested.removeprefix("data.source="))


@pytest.mark.parametrize("name", ["a.parquet.gz", "t.npy.xz", "t.bin.bz2"])
def test_contents_that_aren_t_read_in_order_are_refused_with_the_command(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(COMPRESS[path.suffix](b"PAR1"))
    for words in ({}, {"text_field": "text"} if "parquet" in name else {}):
        with pytest.raises(DataError, match="is compressed") as caught:
            opened(path, tmp_path, **words)
    subprocess.run(shlex.split(caught.value.fix), check=True)
    assert path.with_suffix("").read_bytes() == b"PAR1"


def test_zstandard_without_its_package_says_the_pip_command(tmp_path, monkeypatch):
    (tmp_path / "a.txt.zst").write_bytes(b"")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(DataError, match="pyarrow package is not installed") as caught:
        opened(tmp_path / "a.txt.zst", tmp_path)
    assert caught.value.fix == "pip install pyarrow"


@pytest.mark.parametrize("long_chars", [0, 2**24])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.gz"])
def test_a_byte_order_mark_is_no_text(tmp_path, monkeypatch, name, long_chars):
    monkeypatch.setattr(source_text, "_LONG_CHARS", long_chars)
    data = LINES if "jsonl" in name else "".join(TEXTS).encode()
    found = []
    for folder, mark in (("plain", b""), ("marked", codecs.BOM_UTF8)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes((gzip.compress if name.endswith("gz") else bytes)(mark + data))
        source = tmp_path / folder / name
        found.append(opened(source, tmp_path, text_field="text" if "jsonl" in name else None))
    assert found[0].fingerprint == found[1].fingerprint


def test_a_byte_order_mark_at_the_start_of_a_record_is_no_text():
    field, empty = RecordField("text"), EmptyTexts()
    assert field.document("\ufeffä\ufeff", "here", likely=None) == "ä\ufeff"
    assert list(read_own(["\ufeffa", "\ufeff", "b"], range(3), empty, source="x")) == ["a", "b"] and empty.count == 1


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
def test_another_unicode_encoding_is_named_with_the_command(tmp_path, name, encoding):
    mark = codecs.BOM_UTF16_BE if encoding == "utf-16-be" else b""
    data = mark + LINES.decode().encode(encoding)
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    with pytest.raises(DataError, match=re.escape(str(path))) as caught:
        opened(path, tmp_path, text_field="text" if "jsonl" in name else None)
    command, _, _ = caught.value.fix.partition(" > ")
    for part in command.split(", then "):
        written = subprocess.run(shlex.split(part), check=True, capture_output=True).stdout
    assert written.removeprefix(codecs.BOM_UTF8) == LINES
