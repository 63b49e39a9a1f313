"""Parquet: every row is a document or an error that names its file and number."""

from __future__ import annotations

import importlib.util
import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.data.sources.record_field import RecordField
from meshwright.data.sources.record_files import read_texts
from meshwright.data.sources.source_text import EmptyTexts
from meshwright.data.text_corpus import open_corpus
from meshwright.data.text_documents import Document, Extent, TextSlice
from meshwright.errors import DataError

ANY_TEXT = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture], deadline=None,
                    max_examples=25)  # fmt: skip
texts = st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1), max_size=40)


def write(path, texts, column="text", kind=None, **more):
    ids = pa.array(range(len(texts)))
    pq.write_table(pa.table({"id": ids, column: pa.array(texts, kind or pa.string())}), path, **more)


def read(path, extent=Extent.FULL, column="text"):
    empty = EmptyTexts()
    part = TextSlice(Document(str(path), path.name, path.stat().st_size, 0), extent)
    return list(read_texts(part, RecordField(column), empty, source=str(path))), empty


def opened(source, folder, **more):
    return open_corpus(str(source), tokenizer="bytes", token_dtype="uint16", cache_dir=str(folder / "cache"), **more)


@ANY_TEXT
@given(texts=texts, group=st.integers(1, 12))
def test_texts_come_back_and_the_last_tenth_of_the_rows_is_held_out(tmp_path, texts, group):
    path = tmp_path / "a.parquet"
    write(path, texts, row_group_size=group)
    head, tail = (read(path, extent)[0] for extent in (Extent.HEAD, Extent.TAIL))
    assert read(path)[0] == head + tail == texts
    assert len(tail) == len(texts) // 10


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_every_type_of_strings(tmp_path, kind):
    write(tmp_path / "a.parquet", ["a", "é", "a"], kind=kind)
    assert read(tmp_path / "a.parquet")[0] == ["a", "é", "a"]


def test_only_the_row_groups_of_a_portion_are_read(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    write(path, [f"text {number}" for number in range(100)], row_group_size=10)
    groups, real = [], pq.ParquetFile.iter_batches

    def iter_batches(self, *args, row_groups, **more):
        groups.extend(row_groups)
        return real(self, *args, row_groups=row_groups, **more)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
    assert read(path, Extent.TAIL)[0] == [f"text {number}" for number in range(90, 100)]
    assert groups == [9]


BROKEN = {
    "null": (["a", "b", None], pa.string(), "text is null in", "row 2"),
    "a zero character": (["a", "a\0b"], pa.string(), "text has a zero character", "row 1"),
    "numbers": ([1, 2], pa.int64(), "text is of type int64 in", "a.parquet"),
    "bytes": ([b"a"], pa.binary(), "text is of type binary in", "a.parquet"),
    "not UTF-8": ([b"a", b"b\xff"], pa.binary(), "text is not UTF-8 from its byte 2 on", "row 1"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_row_that_is_no_text_is_named_with_its_file_and_number(tmp_path, name):
    values, kind, says, place = BROKEN[name]
    path = tmp_path / "a.parquet"
    if name == "not UTF-8":
        damaged = pa.array(values, kind).view(pa.string())
        pq.write_table(pa.table({"text": damaged}), path)
    else:
        write(path, values, kind=kind)
    with pytest.raises(DataError) as caught:
        read(path)
    assert says in caught.value.what and f"{path}" in caught.value.what and place in caught.value.what


def test_a_column_that_is_missing_from_one_file(tmp_path):
    write(tmp_path / "a.parquet", ["a"] * 20)
    write(tmp_path / "b.parquet", ["a"] * 20, column="body")
    with pytest.raises(DataError, match=r"b.parquet has no column text; it has id and body") as caught:
        opened(f"{tmp_path}/*.parquet", tmp_path, text_field="text")
    assert caught.value.fix.startswith("data.text_field=body")


def test_a_file_that_breaks_off_is_named(tmp_path):
    write(tmp_path / "a.parquet", [f"text {number * 7919 % 10_007}" for number in range(5000)], compression="none")
    data = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "half.parquet").write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=r"half.parquet is not a Parquet file, or a part of one"):
        read(tmp_path / "half.parquet")
    (tmp_path / "torn.parquet").write_bytes(bytes(len(data) * 3 // 4) + data[len(data) * 3 // 4 :])
    with pytest.raises(DataError, match=r"torn.parquet can't be read from row 0 on"):
        read(tmp_path / "torn.parquet")


def test_without_a_field_the_columns_found_are_shown_and_the_fix_works(tmp_path):
    path = tmp_path / "a.parquet"
    columns = {"url": ["x"] * 20, "tags": [["t"]] * 20, "id": list(range(20)), "story": ["a document " * 9] * 20}
    pq.write_table(pa.table(columns), path)
    with pytest.raises(DataError) as caught:
        opened(path, tmp_path)
    shown = caught.value.what.partition("with the columns ")[2]
    assert shown.startswith("url (string), tags (list<") and shown.endswith("id (int64) and story (string)")
    assert caught.value.fix == "data.text_field=story"
    assert len(opened(path, tmp_path, text_field="story").train)


def test_shards_are_all_there(tmp_path):
    for number in (0, 2):
        write(tmp_path / f"a-{number:05d}-of-00003.parquet", ["a"] * 20)
    with pytest.raises(DataError, match=r"1 shard of 3 missing: a-00001-of-00003.parquet"):
        opened(f"{tmp_path}/*.parquet", tmp_path, text_field="text")


def test_rows_without_text_are_counted_and_each_row_is_a_document(tmp_path, caplog):
    found = [f"document {number} " * (number % 5 + 1) if number % 7 else "" for number in range(30)]
    write(tmp_path / "a.parquet", found, row_group_size=8)
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        corpus = opened(tmp_path / "a.parquet", tmp_path, text_field="text", with_documents=True)
    assert f"the first document without text is {tmp_path}/a.parquet, row 0" in caplog.text
    assert "left out 5 documents" in corpus.description
    ends = [*corpus.train_documents.ends, *corpus.validation_documents.ends]
    assert np.diff([0, *ends]).tolist() == [len(one) + 1 for one in found if one]


def test_without_pyarrow_the_pip_command_is_said(tmp_path, monkeypatch):
    write(tmp_path / "a.parquet", ["a"] * 20)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for more in ({}, {"text_field": "text"}):
        with pytest.raises(DataError, match="pyarrow package is not installed") as caught:
            opened(tmp_path / "a.parquet", tmp_path, **more)
        assert caught.value.fix == "pip install pyarrow"
