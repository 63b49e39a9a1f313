"""JSON lines: every line is a document or an error that names its file and number."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.data.sources.record_field import RecordField
from meshwright.data.sources.record_files import check_record_files, read_texts
from meshwright.data.sources.source_text import EmptyTexts
from meshwright.data.text_corpus import open_corpus
from meshwright.data.text_documents import Document, Extent, TextSlice, list_documents
from meshwright.errors import DataError
from tests.helpers import clean_environment


def lines_of(texts, field="text"):
    return "".join(json.dumps({"id": number, field: text}) + "\n" for number, text in enumerate(texts))


def read(path, extent=Extent.FULL, field="text"):
    empty = EmptyTexts()
    part = TextSlice(Document(str(path), path.name, path.stat().st_size, 0), extent)
    return list(read_texts(part, RecordField(field), empty, source=str(path))), empty


def opened(source, folder, **more):
    return open_corpus(str(source), tokenizer="bytes", token_dtype="uint16", cache_dir=str(folder / "cache"), **more)


ANY_TEXT = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
texts = st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1), max_size=40)


@ANY_TEXT
@given(texts=texts)
def test_texts_come_back_and_the_last_tenth_of_the_lines_is_held_out(tmp_path, texts):
    path = tmp_path / "a.jsonl"
    path.write_text(lines_of(texts), "utf-8")
    head, tail = (read(path, extent)[0] for extent in (Extent.HEAD, Extent.TAIL))
    assert read(path)[0] == head + tail == texts
    assert len(tail) == len(texts) // 10


def test_blank_lines_byte_order_marks_and_other_line_ends_are_no_content(tmp_path):
    path = tmp_path / "a.ndjson"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "\xc3\xa9\xe2\x80\xa8b"}')
    assert read(path)[0] == ["a", "é\u2028b"]


BROKEN = {
    "a line that breaks off": (b'{"text": "a', "is not JSON at character 10"),
    "two objects": (b'{"text": "a"} {"text": "b"}', "is not JSON at character 15"),
    "Latin-1": (b'{"text": "\xe9"}', "is not UTF-8 from its byte 11 on"),
    "too deep": (b"[" * 100_000, "is not JSON: maximum recursion depth exceeded"),
    "an array": (b'["a"]', "is an array"),
    "a string": (b'"a"', "is a string"),
    "another field": (b'{"content": "a", "id": 1}', "has no field text; it has content and id"),
    "no field": (b"{}", "has no field text; it has nothing"),
    "a number": (b'{"text": 3}', "text is a number in"),
    "null": (b'{"text": null, "content": "a"}', "text is null in"),
    "a list of parts": (b'{"text": ["a"]}', "text is an array in"),
    "a zero character": (b'{"text": "a\\u0000b"}', "text has a zero character"),
    "half a pair": (b'{"text": "\\ud83d"}', "text has half a surrogate pair"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_line_that_is_none_is_named_with_its_file_and_number(tmp_path, name):
    line, says = BROKEN[name]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine"}\n')
    with pytest.raises(DataError) as caught:
        read(path)
    assert says in caught.value.what and f"{path}:3" in f"{caught.value.what} {caught.value.where}"
    with pytest.raises(DataError, match="a.jsonl:3"):
        opened(path, tmp_path, text_field="text")
    assert not list((tmp_path / "cache").glob("*.tokens"))


def test_without_a_field_the_fields_found_are_shown_and_the_fix_works(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(lines_of(["a document " * 9] * 20, field="content").replace('{"id"', '{"url": "x", "n": [1], "id"'))
    with pytest.raises(DataError) as caught:
        opened(path, tmp_path)
    assert "url (a string), n (an array), id (a number) and content (a string)" in caught.value.what
    assert caught.value.fix == "data.text_field=content"
    assert len(opened(path, tmp_path, text_field="content").train)


@pytest.mark.parametrize(("line", "fix"), [
    ({"a": "short", "b": "a longer one"}, "data.text_field=b"),
    ({"my text": "a"}, "data.text_field='my text'"),
    ({"meta": "a much longer one", "text": "short"}, "data.text_field=text"),
])  # fmt: skip
def test_the_field_that_is_most_likely_the_text_is_suggested(tmp_path, line, fix):
    (tmp_path / "a.jsonl").write_text(json.dumps(line))
    with pytest.raises(DataError) as caught:
        opened(tmp_path / "a.jsonl", tmp_path)
    assert caught.value.fix == fix


def test_a_field_of_other_files_has_no_effect(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 100)
    np.save(tmp_path / "a.npy", np.arange(100, dtype=np.uint16))
    for name in ("a.txt", "a.npy"):
        with pytest.raises(DataError, match="has no effect"):
            opened(tmp_path / name, tmp_path, text_field="text")
        assert len(opened(tmp_path / name, tmp_path).train)


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


def test_lines_without_text_are_counted_and_the_first_is_named(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    path.write_text(lines_of(["a", "", "b" * 10, "", *["c"] * 16]))
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        first = opened(path, tmp_path, text_field="text")
    assert f"the first document without text is {path}:2" in caplog.text
    again = opened(path, tmp_path, text_field="text")
    for corpus in (first, again):
        assert "left out 2 documents: their text is empty" in corpus.description, "also of what was tokenised before"
    assert first.fingerprint == again.fingerprint


def test_each_line_is_a_document_and_each_field_a_corpus(tmp_path):
    found = [f"document {number} " * (number % 5 + 1) for number in range(30)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": one, "title": one[:3]}) + "\n" for one in found))
    corpus = opened(path, tmp_path, text_field="text", with_documents=True)
    ends = [*corpus.train_documents.ends, *corpus.validation_documents.ends]
    assert np.diff([0, *ends]).tolist() == [len(one) + 1 for one in found]
    assert bytes(corpus.train.astype(np.uint8)).split(b"\0")[:-1] == [one.encode() for one in found[:27]]
    titles = opened(path, tmp_path, text_field="title")
    assert bytes(titles.train[:8].astype(np.uint8)) == b"doc\0doc\0"


def test_the_corpus_is_that_of_text_files_with_the_same_documents(tmp_path):
    """With enough files of either kind, the hold-out rule takes whole files, by name."""
    for kind in ("txt", "jsonl"):
        (tmp_path / kind).mkdir()
    for number in range(120):
        text = f"document {number} " * 3
        (tmp_path / "txt" / f"{number}.jsonl.txt").write_text(text)
        (tmp_path / "jsonl" / f"{number}.jsonl").write_text(lines_of([text]))
    assert len(opened(f"{tmp_path}/jsonl/*.jsonl", tmp_path, text_field="text").train) > 100
    mixed = opened(f"{tmp_path}/*/*", tmp_path, text_field="text")
    assert len(mixed.train) + len(mixed.validation) == 2 * sum(3 * len(f"document {n} ") + 1 for n in range(120))


@pytest.mark.slow
def test_a_run_reads_json_lines(forked_meshwright, tmp_path):
    lines = lines_of([f"line {number} of a corpus\n" * 20 for number in range(200)])
    (tmp_path / "corpus.jsonl").write_text(lines)
    words = ["train.steps=2", "train.validation_samples=8", "train.sample_tokens=0", "model.num_layers=1"]
    source = [f"data.source={tmp_path / 'corpus.jsonl'}", f"data.cache_dir={tmp_path / 'cache'}"]
    environment = clean_environment(OMP_NUM_THREADS="1")
    done = forked_meshwright("run", "llama-tiny", *words, *source, "--out", tmp_path / "run", env=environment)
    assert done.returncode == 2 and "data.text_field=text" in done.stderr, done.stderr
    done = forked_meshwright(
        "run", "llama-tiny", *words, *source, "data.text_field=text", "--out", tmp_path / "run", env=environment
    )
    assert done.returncode == 0, done.stderr
