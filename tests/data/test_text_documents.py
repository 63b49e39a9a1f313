"""Text files: each once, split by name alone, read as what they hold if compressed or marked, and damage is named."""

from __future__ import annotations

import bz2
import codecs
import gzip
import importlib.util
import json
import lzma
import os
import re
import shlex
import subprocess

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.data.sources import source_text
from meshwright.data.sources.record_field import RecordField
from meshwright.data.sources.source_text import EmptyTexts, read_pieces
from meshwright.data.sources.user_source import read_texts as read_own
from meshwright.data.text_corpus import open_corpus
from meshwright.data.text_documents import (
    MIN_HELD_OUT_FILES,
    Document,
    Extent,
    TextSlice,
    list_documents,
    split,
)
from meshwright.errors import DataError

# The first text that hypothesis makes on a machine costs a second or two.
ANY_TEXT = settings(suppress_health_check=[HealthCheck.too_slow])


def documents(names, num_bytes=10):
    return [Document(f"/somewhere/{name}", name, num_bytes, 0) for name in names]


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)


file_names = st.sets(st.text("abcdef/", min_size=1, max_size=9), max_size=300).map(sorted)


@given(names=file_names, num_bytes=st.integers(0, 2))
def test_a_split_covers_every_document_once(names, num_bytes):
    train, validation = split(documents(names, num_bytes))
    if train and train[0].extent is Extent.HEAD:
        assert [piece.document.name for piece in train] == [piece.document.name for piece in validation] == names
        assert {piece.extent for piece in train} == {Extent.HEAD}
        assert {piece.extent for piece in validation} == {Extent.TAIL}
    else:
        held_out = [piece.document.name for piece in validation]
        assert sorted([piece.document.name for piece in train] + held_out) == names
        assert held_out == sorted(held_out)
        assert {piece.extent for piece in train + validation} <= {Extent.FULL}
        assert not names or (num_bytes and len(held_out) >= MIN_HELD_OUT_FILES)


@given(base=st.integers(0, 10**6))
def test_adding_a_document_moves_no_other(base):
    names = [f"file{number}.txt" for number in range(base, base + 200)]
    parts = {piece.document.name: part for part, pieces in enumerate(split(documents(names))) for piece in pieces}
    fewer = {piece.document.name: part for part, pieces in enumerate(split(documents(names[:-1]))) for piece in pieces}
    assert fewer.items() <= parts.items()


def test_a_tenth_of_many_files_is_held_out():
    train, validation = split(documents([f"folder/file{number}.txt" for number in range(20_000)]))
    # Binomial with standard deviation 42.
    assert abs(len(validation) - 2000) < 210 and len(train) + len(validation) == 20_000


def test_golden_hold_out():
    """Pinned: another choice would silently train on what was held out before."""
    _, validation = split(documents([f"file{number}.txt" for number in range(100)]))
    assert [piece.document.name for piece in validation] == GOLDEN


@ANY_TEXT
@given(text=st.text(max_size=50))
def test_head_and_tail_make_the_whole(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("texts")
    text = text.replace("\0", "")
    write(folder, {"a.txt": text})
    (document,) = list_documents(str(folder / "a.txt"))
    head, tail, whole = (
        "".join(read_pieces(TextSlice(document, extent), source="*"))
        for extent in (Extent.HEAD, Extent.TAIL, Extent.FULL)
    )
    assert head + tail == whole == text
    assert len(tail) == len(text) // 10


def test_a_glob_lists_matching_files_once_sorted_by_relative_name(tmp_path, monkeypatch):
    write(tmp_path, {"data/b.txt": "1", "data/a/z.txt": "22", "data/a.txt": "3", "data/no.md": "4", "data/x.txt/y": ""})
    found = list_documents(str(tmp_path / "data" / "**" / "**" / "*.txt"))
    assert [(item.name, item.num_bytes) for item in found] == [("a.txt", 1), ("a/z.txt", 2), ("b.txt", 1)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for pattern in ("data/**/*.txt", "~/data/**/*.txt", "./data/**/*.txt"):
        assert [item.name for item in list_documents(pattern)] == [item.name for item in found]


def test_a_file_named_with_brackets_is_itself(tmp_path):
    write(tmp_path, {"a[1].txt": "x", "a1.txt": "y"})
    assert [item.name for item in list_documents(str(tmp_path / "a[1].txt"))] == ["a[1].txt"]


def test_a_file_is_listed_once_by_its_own_path(tmp_path):
    """Links to files and folders, absolute and relative, beside and above what they lead to."""
    write(tmp_path, {f"b/{number}.txt": "x" for number in range(80)} | {"elsewhere/o.txt": "o"})
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b" / "other.txt").symlink_to(tmp_path / "b" / "0.txt")
    (tmp_path / "b" / "to").symlink_to("../elsewhere")
    (tmp_path / "c").symlink_to(tmp_path)  # leads to itself, but no pattern below goes through it
    names = [f"b/{number}.txt" for number in range(80)]
    for pattern in ("[ab]/**/**/*.txt", "[ab]/[0-9o]*.txt"):
        found = [one.name for one in list_documents(str(tmp_path / pattern))]
        assert sorted(set(found) - {"b/to/o.txt", "a/to/o.txt"}) == sorted(names) and len(set(found)) == len(found)
    assert [one.name for one in list_documents(str(tmp_path / "a" / "*.txt"))] == sorted(f"{n}.txt" for n in range(80))
    train, validation = split(list_documents(str(tmp_path / "[ab]" / "*.txt")))
    files = [{os.path.realpath(one.document.path) for one in part} for part in (train, validation)]
    assert not files[0] & files[1] and len(files[0] | files[1]) == 80


def test_links_that_lead_nowhere_or_to_where_they_are_are_named(tmp_path):
    write(tmp_path, {"a/x.txt": "x", "a/b/x.txt": "x"})
    for link, target, what, pattern in (
        ("a/y.txt", "gone.txt", "no file", "**/*.txt"),
        ("a/z.txt", "z.txt", "no file", "a/*"),
        ("a/b/up", "..", "a folder that it is in", "**/*.txt"),
        ("a/b/too", tmp_path, "a folder that it is in", "a/**/x.txt"),
    ):
        (tmp_path / link).symlink_to(target)
        with pytest.raises(DataError, match=f"{link} is a link to {what}") as caught:
            list_documents(str(tmp_path / pattern))
        assert caught.value.where == f"data.source, {tmp_path / pattern}"
        os.unlink(shlex.split(caught.value.fix.partition(",")[0])[1])
        assert len(list_documents(str(tmp_path / pattern))) == (1 if pattern == "a/*" else 2)


@pytest.mark.parametrize("name", ["dä ta [1]/a.txt", "[1] [2]/[x]/a.txt"])
def test_brackets_that_match_nothing_are_said_with_a_pattern_that_does(tmp_path, name):
    write(tmp_path, {name: "x"})
    with pytest.raises(DataError, match=r"in which \[ starts a list of characters") as caught:
        list_documents(str(tmp_path / name).replace("a.txt", "*.txt"))
    [word] = shlex.split(caught.value.fix)
    assert [one.path for one in list_documents(word.removeprefix("data.source="))] == [str(tmp_path / name)]


def test_nothing_found_says_what_is_near(tmp_path):
    write(tmp_path, {"texts/shakespeare.txt": "x"})
    with pytest.raises(DataError) as caught:
        list_documents(str(tmp_path / "texts" / "more" / "*.txt"))
    assert f"the nearest existing directory is {tmp_path / 'texts'})" in caught.value.what
    assert caught.value.where.startswith("data.source, ")
    for missing in ("texts/shakespear.txt", "texts"):
        with pytest.raises(DataError) as caught:
            list_documents(str(tmp_path / missing))
        assert list_documents(caught.value.fix.removeprefix("data.source=").strip("'"))


@pytest.mark.parametrize(
    ("files", "source", "pattern"),
    [
        (["a.md", "deep/er/b.md", "c.txt"], "", "**/*.md"),
        (["a.py", "b.PY", "c.py"], "", "**/*.py"),
        (["a.md"], "*.txt", "**/*.md"),
        (["wiki [1]/a.md"], "wiki [1]", "**/*.md"),
        ([".hidden/a.md", ".b.md", "weights.bin"], "", None),
        ([], "", None),
    ],
)
def test_a_folder_is_given_a_pattern_that_finds_its_texts(tmp_path, files, source, pattern):
    root = tmp_path / "my texts"
    write(root, dict.fromkeys(files, "x"))
    root.mkdir(exist_ok=True)
    with pytest.raises(DataError) as caught:
        list_documents(str(root / source))
    fix = caught.value.fix
    if pattern is None:
        assert fix == "a pattern that matches text files, or data.source=stdlib"
        return
    [suggested] = shlex.split(fix.partition(", or ")[0])
    assert suggested.endswith(pattern) and list_documents(suggested.removeprefix("data.source="))


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    write(tmp_path, {"a.txt": "x"})
    (document,) = list_documents(str(tmp_path / "a.txt"))
    os.unlink(document.path)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_pieces(TextSlice(document, Extent.FULL), source="a.txt")


GOLDEN = ["file9.txt", "file11.txt", "file14.txt", "file21.txt", "file34.txt", "file37.txt", "file43.txt", "file79.txt"]


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
