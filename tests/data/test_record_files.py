"""JSON lines, Parquet and saved datasets: every record is a document, or an error that names its file and number."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
import sys

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.data.sources.record_field import RecordField
from meshwright.data.sources.record_files import check_record_files, read_texts
from meshwright.data.sources.source_text import EmptyTexts
from meshwright.data.sources.text_source import has_records
from meshwright.data.text_corpus import open_corpus
from meshwright.data.text_documents import Document, Extent, TextSlice, list_documents
from meshwright.errors import DataError
from tests.helpers import clean_environment

TEXTS = [f"document {number} " * (number % 5 + 1) for number in range(120)]
ANY_TEXT = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture], deadline=None,
                    max_examples=25)  # fmt: skip
any_texts = st.lists(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1), max_size=40
)


def lines_of(texts, field="text"):
    return "".join(json.dumps({"id": number, field: text}) + "\n" for number, text in enumerate(texts))


def write(path, texts, field="text", *, kind=None, group=None):
    """Write records with an id and a text: as JSON lines, Parquet, or a saved dataset, by the path's suffix."""
    if path.suffix == ".jsonl":
        path.write_text(lines_of(texts, field), "utf-8")
    elif path.suffix == ".parquet":
        table = pa.table({"id": pa.array(range(len(texts))), field: pa.array(texts, kind or pa.string())})
        pq.write_table(table, path, row_group_size=group)
    else:
        datasets.Dataset.from_dict({"id": list(range(len(texts))), field: texts}).save_to_disk(path)
    return path


def read(path, extent=Extent.FULL):
    part = TextSlice(Document(str(path), path.name, path.stat().st_size, 0), extent)
    return list(read_texts(part, RecordField("text"), EmptyTexts(), source=str(path)))


def opened(source, folder, text_field="text", **more):
    return open_corpus(str(source), tokenizer="bytes", token_dtype="uint16", cache_dir=str(folder / "cache"),
                       text_field=text_field, **more)  # fmt: skip


def documents(tokens):
    return bytes(tokens.astype(np.uint8)).decode().split("\0")[:-1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    datasets.disable_progress_bars()
    folder = tmp_path_factory.mktemp("saved")
    columns = {"id": list(range(120)), "text": TEXTS, "tags": [["t"]] * 120}
    datasets.Dataset.from_dict(columns).save_to_disk(folder / "one", num_shards=3)
    return folder / "one"


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


@ANY_TEXT
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@given(texts=any_texts, group=st.integers(1, 12))
def test_texts_come_back_and_the_last_tenth_is_held_out(tmp_path, name, texts, group):
    path = write(tmp_path / name, texts, group=group)
    head, tail = (read(path, extent) for extent in (Extent.HEAD, Extent.TAIL))
    assert read(path) == head + tail == texts
    assert len(tail) == len(texts) // 10


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a"])
def test_empty_texts_are_counted_and_each_record_is_a_document(tmp_path, caplog, name):
    found = [text if number % 7 else "" for number, text in enumerate(TEXTS[:30])]
    path = write(tmp_path / name, found, group=8)
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        corpus = opened(path, tmp_path, with_documents=True)
    first = f"{path}:1" if name == "a.jsonl" else f"{path}, row 0"
    assert f"the first document without text is {first}" in caplog.text
    ends = [*corpus.train_documents.ends, *corpus.validation_documents.ends]
    assert len(ends) == 25 and np.diff([0, *ends]).sum() == sum(len(one) + 1 for one in found if one)
    assert documents(corpus.train) + documents(corpus.validation) == [one for one in found if one] or name == "a"
    again = opened(path, tmp_path)
    assert again.fingerprint != corpus.fingerprint, "documents are part of packed corpora only"
    for one in (corpus, again):
        assert "left out 5 documents: their text is empty" in one.description, "also of what was tokenised before"


FOUND = {
    "a.jsonl": "a.jsonl has JSON lines; the first has url (a string), tags (an array), id (a number) and story (a str",
    "a.parquet": "a.parquet is Parquet with the columns url (string), tags (list<",
    "a": "a is a saved dataset with the columns url (string), tags (List",
}


@pytest.mark.parametrize("name", FOUND)
def test_without_a_field_those_found_are_shown_and_the_fix_works(tmp_path, name):
    rows = [{"url": "x", "tags": ["t"], "id": number, "story": "a document " * 9} for number in range(20)]
    path = tmp_path / name
    if name == "a.jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif name == "a.parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(path)
    with pytest.raises(DataError) as caught:
        opened(path, tmp_path, None)
    assert FOUND[name] in caught.value.what and caught.value.fix == "data.text_field=story"
    assert len(opened(path, tmp_path, "story").train)
    with pytest.raises(DataError, match=r"has no (field|column) text; it has url, tags, id and story") as caught:
        opened(path, tmp_path)
    assert caught.value.fix.startswith("data.text_field=") and str(path) in caught.value.what
    with pytest.raises(DataError, match="id is (a number|of type int64)"):
        opened(path, tmp_path, "id")


@pytest.mark.parametrize(("line", "fix"), [
    ({"a": "short", "b": "a longer one"}, "data.text_field=b"),
    ({"my text": "a"}, "data.text_field='my text'"),
    ({"meta": "a much longer one", "text": "short"}, "data.text_field=text"),
])  # fmt: skip
def test_the_field_that_is_most_likely_the_text_is_suggested(tmp_path, line, fix):
    (tmp_path / "a.jsonl").write_text(json.dumps(line))
    with pytest.raises(DataError) as caught:
        opened(tmp_path / "a.jsonl", tmp_path, None)
    assert caught.value.fix == fix


def test_a_field_of_other_files_has_no_effect(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 100)
    np.save(tmp_path / "a.npy", np.arange(100, dtype=np.uint16))
    for name in ("a.txt", "a.npy"):
        with pytest.raises(DataError, match="has no effect"):
            opened(tmp_path / name, tmp_path)
        assert len(opened(tmp_path / name, tmp_path, None).train)


@pytest.mark.parametrize(("names", "pattern", "missing"), [
    (["a-00000-of-00003", "a-00002-of-00003"], "*.jsonl", "1 shard of 3 missing: a-00001-of-00003.jsonl"),
    (["a-1-of-3", "b-1-of-1"], "*.jsonl", "2 shards of 3 missing: a-2-of-3.jsonl and a-3-of-3.jsonl"),
    (["a-00000-of-00003", "a-00002-of-00003"], "*-0000[02]-of-*.jsonl", None),
    (["a-00000-of-00002", "a-00001-of-00002", "c"], "*.jsonl", None),
    (["a-00000-of-00002-0e6ce83ee8ed9fa6", "a-00001-of-00002-bd4c0d4a5e5e6c1a"], "*.jsonl", None),
    (["a-00000-of-00002-0e6ce83ee8ed9fa6"], "*.jsonl", "1 shard of 2 missing: a-00001-of-00002.jsonl"),
    (["a-1-of-3", "a-2-of-3"], "*.jsonl", "1 shard of 3 missing: a-3-of-3.jsonl, or number 0 if they start there"),
])  # fmt: skip
def test_shards_that_the_pattern_matches_are_all_there(tmp_path, names, pattern, missing):
    for name in names:
        (tmp_path / f"{name}.jsonl").write_text(lines_of(["a"]))
    source = f"{tmp_path}/{pattern}"
    if missing is None:
        check_record_files(list_documents(source), RecordField("text"), source=source)
        return
    with pytest.raises(DataError) as caught:
        check_record_files(list_documents(source), RecordField("text"), source=source)
    assert caught.value.what == missing


@pytest.mark.parametrize("package", ["pyarrow", "datasets"])
def test_without_its_package_the_pip_command_is_said(saved, tmp_path, monkeypatch, package):
    source = write(tmp_path / "a.parquet", ["a"] * 20) if package == "pyarrow" else saved
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for field in (None, "text"):
        with pytest.raises(DataError, match=f"{package} package is not installed") as caught:
            opened(source, tmp_path, field)
        assert caught.value.fix == f"pip install {package}"


def test_blank_lines_byte_order_marks_and_other_line_ends_are_no_content(tmp_path):
    path = tmp_path / "a.ndjson"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "\xc3\xa9\xe2\x80\xa8b"}')
    assert read(path) == ["a", "é\u2028b"]


LINES = {
    "a line that breaks off": (b'{"text": "a', "is not JSON at character 10"),
    "two objects": (b'{"text": "a"} {"text": "b"}', "is not JSON at character 15"),
    "Latin-1": (b'{"text": "\xe9"}', "is not UTF-8 from its byte 11 on"),
    "too deep": (b"[" * 100_000, "is not JSON: maximum recursion depth exceeded"),
    "an array": (b'["a"]', "is an array"),
    "a string": (b'"a"', "is a string"),
    "no field": (b"{}", "has no field text; it has nothing"),
    "a number": (b'{"text": 3}', "text is a number in"),
    "null": (b'{"text": null, "content": "a"}', "text is null in"),
    "a list of parts": (b'{"text": ["a"]}', "text is an array in"),
    "a zero character": (b'{"text": "a\\u0000b"}', "text has a zero character"),
    "half a pair": (b'{"text": "\\ud83d"}', "text has half a surrogate pair"),
}


@pytest.mark.parametrize("name", LINES)
def test_a_line_that_is_none_is_named_with_its_file_and_number(tmp_path, name):
    line, says = LINES[name]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine"}\n')
    with pytest.raises(DataError) as caught:
        opened(path, tmp_path)
    assert says in caught.value.what and f"{path}:3" in f"{caught.value.what} {caught.value.where}"
    assert not list((tmp_path / "cache").glob("*.tokens"))


ROWS = {
    "null": (["a", "b", None], pa.string(), "text is null in", "row 2"),
    "a zero character": (["a", "a\0b"], pa.string(), "text has a zero character", "row 1"),
    "bytes": ([b"a"], pa.binary(), "text is of type binary in", "a.parquet"),
    "not UTF-8": ([b"a", b"b\xff"], pa.binary(), "text is not UTF-8 from its byte 2 on", "row 1"),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_that_is_no_text_is_named_with_its_file_and_number(tmp_path, name):
    values, kind, says, place = ROWS[name]
    path = tmp_path / "a.parquet"
    array = pa.array(values, kind)
    pq.write_table(pa.table({"text": array.view(pa.string()) if name == "not UTF-8" else array}), path)
    with pytest.raises(DataError) as caught:
        read(path)
    assert says in caught.value.what and f"{path}" in caught.value.what and place in caught.value.what


@pytest.mark.parametrize(("value", "says"), [(None, "text is null in"), ("a\0b", "text has a zero character")])
def test_a_saved_row_that_is_no_text_is_named(tmp_path, value, says):
    write(tmp_path / "one", ["a"] * 17 + [value] + ["a"] * 12)
    with pytest.raises(DataError, match=says) as caught:
        opened(tmp_path / "one", tmp_path)
    assert f"{tmp_path}/one, row 17" in caught.value.what


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_every_type_of_strings(tmp_path, kind):
    assert read(write(tmp_path / "a.parquet", ["a", "é", "a"], kind=kind)) == ["a", "é", "a"]


def test_only_the_row_groups_of_a_portion_are_read(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", [f"text {number}" for number in range(100)], group=10)
    groups, real = [], pq.ParquetFile.iter_batches

    def iter_batches(self, *args, row_groups, **more):
        groups.extend(row_groups)
        return real(self, *args, row_groups=row_groups, **more)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
    assert read(path, Extent.TAIL) == [f"text {number}" for number in range(90, 100)]
    assert groups == [9]


def test_a_parquet_file_that_breaks_off_is_named(tmp_path):
    table = pa.table({"text": [f"text {number * 7919 % 10_007}" for number in range(5000)]})
    pq.write_table(table, tmp_path / "a.parquet", compression="none")
    data = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "half.parquet").write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=r"half.parquet is not a Parquet file, or a part of one"):
        read(tmp_path / "half.parquet")
    (tmp_path / "torn.parquet").write_bytes(bytes(len(data) * 3 // 4) + data[len(data) * 3 // 4 :])
    with pytest.raises(DataError, match=r"torn.parquet can't be read from row 0 on"):
        read(tmp_path / "torn.parquet")


def test_each_field_is_a_corpus(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": one, "title": one[:3]}) + "\n" for one in TEXTS[:30]))
    assert documents(opened(path, tmp_path).train) == TEXTS[:27]
    assert documents(opened(path, tmp_path, "title").train) == ["doc"] * 27


def test_with_many_files_of_either_kind_whole_ones_are_held_out(tmp_path):
    for kind in ("txt", "jsonl"):
        (tmp_path / kind).mkdir()
    for number in range(120):
        text = f"document {number} " * 3
        (tmp_path / "txt" / f"{number}.jsonl.txt").write_text(text)
        (tmp_path / "jsonl" / f"{number}.jsonl").write_text(lines_of([text]))
    assert len(opened(f"{tmp_path}/jsonl/*.jsonl", tmp_path).train) > 100
    mixed = opened(f"{tmp_path}/*/*", tmp_path)
    assert len(mixed.train) + len(mixed.validation) == 2 * sum(3 * len(f"document {n} ") + 1 for n in range(120))


@pytest.mark.slow
def test_a_run_reads_json_lines(forked_meshwright, tmp_path):
    lines = lines_of([f"line {number} of a corpus\n" * 20 for number in range(200)])
    (tmp_path / "corpus.jsonl").write_text(lines)
    words = ["train.steps=2", "train.validation_samples=8", "train.sample_tokens=0", "model.num_layers=1",
             f"data.source={tmp_path / 'corpus.jsonl'}", f"data.cache_dir={tmp_path / 'cache'}"]  # fmt: skip
    for field, status in (([], 2), (["data.text_field=text"], 0)):
        done = forked_meshwright("run", "llama-tiny", *words, *field, "--out", tmp_path / "run",
                                 env=clean_environment(OMP_NUM_THREADS="1"))  # fmt: skip
        assert done.returncode == status and (field or "data.text_field=text" in done.stderr), done.stderr


def test_each_row_of_a_saved_dataset_is_in_one_split_in_its_order(saved, tmp_path):
    corpus = opened(saved, tmp_path, with_documents=True)
    train, held_out = documents(corpus.train), documents(corpus.validation)
    assert sorted(train + held_out) == sorted(TEXTS)
    for split in (train, held_out):
        numbers = [int(text.split()[1]) for text in split]
        assert numbers == sorted(numbers)
    assert 5 <= len(held_out) <= 25
    assert len(corpus.train_documents.ends) == len(train)


def test_the_cache_serves_without_the_library_and_knows_other_files(copy, tmp_path, monkeypatch):
    before = opened(copy, tmp_path)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "datasets", None)
        assert opened(copy, tmp_path).fingerprint == before.fingerprint
    for path in copy.glob("*.arrow"):
        path.write_bytes(path.read_bytes().replace(b"document", b"argument"))
    after = opened(copy, tmp_path)
    assert len(after.train) == len(before.train) and after.fingerprint != before.fingerprint, "of the same size"
    datasets.Dataset.from_dict({"text": TEXTS[:60]}).save_to_disk(copy)
    assert len(opened(copy, tmp_path).train) < len(before.train)


def test_a_dictionary_of_datasets_lists_its_splits(saved, tmp_path):
    one = datasets.load_from_disk(str(saved))
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "both")
    with pytest.raises(DataError, match="holds several datasets: train, test") as caught:
        opened(tmp_path / "both", tmp_path)
    assert caught.value.fix == f"data.source={tmp_path}/both/train"
    assert opened(tmp_path / "both/train", tmp_path).fingerprint == opened(saved, tmp_path).fingerprint


def test_a_folder_that_is_not_whole_is_named(copy, tmp_path):
    state = json.loads((copy / "state.json").read_text())
    shard = copy / state["_data_files"][1]["filename"]
    data = shard.read_bytes()
    shard.write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match="datasets can't load"):
        opened(copy, tmp_path)
    shard.unlink()
    with pytest.raises(DataError, match=f"{shard.name} cannot be read: No such file"):
        opened(copy, tmp_path)
    (copy / "state.json").write_text("{")
    with pytest.raises(DataError, match=r"state.json is damaged"):
        opened(copy, tmp_path)


def test_which_sources_have_records(saved, tmp_path):
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "a.txt").write_text("text")
    assert has_records(str(saved)) and has_records(f"{tmp_path}/*")
    assert not has_records(f"{tmp_path}/*.txt") and not has_records("stdlib") and not has_records("module:Source")
