"""Data sets that Hugging Face's `save_to_disk` wrote, and everything that can be wrong with them."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
import sys

import datasets
import numpy as np
import pytest

from meshwright.data.sources.text_source import has_records
from meshwright.data.text_corpus import open_corpus
from meshwright.errors import DataError

TEXTS = [f"document {number} " * (number % 5 + 1) for number in range(120)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    datasets.disable_progress_bars()
    folder = tmp_path_factory.mktemp("saved")
    columns = {"id": list(range(120)), "body": TEXTS, "tags": [["t"]] * 120}
    datasets.Dataset.from_dict(columns).save_to_disk(folder / "one", num_shards=3)
    return folder / "one"


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def opened(source, folder, text_field="body", **more):
    return open_corpus(
        str(source),
        tokenizer="bytes",
        token_dtype="uint16",
        cache_dir=str(folder / "cache"),
        text_field=text_field,
        **more,
    )


def documents(tokens):
    return bytes(tokens.astype(np.uint8)).decode().split("\0")[:-1]


def test_each_row_is_a_document_in_one_split_in_its_order(saved, tmp_path):
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
    datasets.Dataset.from_dict({"body": TEXTS[:60]}).save_to_disk(copy)
    assert len(opened(copy, tmp_path).train) < len(before.train)


def test_the_cache_knows_files_of_the_same_size(copy, tmp_path):
    before = opened(copy, tmp_path)
    for path in copy.glob("*.arrow"):
        path.write_bytes(path.read_bytes().replace(b"document", b"argument"))
    after = opened(copy, tmp_path)
    assert len(after.train) == len(before.train) and after.fingerprint != before.fingerprint


def test_a_dictionary_of_datasets_lists_its_splits(saved, tmp_path):
    one = datasets.load_from_disk(str(saved))
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "both")
    with pytest.raises(DataError, match="holds several datasets: train, test") as caught:
        opened(tmp_path / "both", tmp_path)
    assert caught.value.fix == f"data.source={tmp_path}/both/train"
    assert opened(tmp_path / "both/train", tmp_path).fingerprint == opened(saved, tmp_path).fingerprint


def test_a_column_is_asked_for_and_shown(saved, tmp_path):
    with pytest.raises(DataError, match=r"columns id \(int64\), body \(string\) and tags") as caught:
        opened(saved, tmp_path, None)
    assert caught.value.fix == "data.text_field=body"
    with pytest.raises(DataError, match="has no column text; it has id, body and tags"):
        opened(saved, tmp_path, "text")
    with pytest.raises(DataError, match="id is of type int64"):
        opened(saved, tmp_path, "id")


@pytest.mark.parametrize(("value", "says"), [(None, "body is null in"), ("a\0b", "body has a zero character")])
def test_a_row_that_is_no_text_is_named(tmp_path, value, says):
    datasets.Dataset.from_dict({"body": ["a"] * 17 + [value] + ["a"] * 12}).save_to_disk(tmp_path / "one")
    with pytest.raises(DataError, match=says) as caught:
        opened(tmp_path / "one", tmp_path)
    assert f"{tmp_path}/one, row 17" in caught.value.what


def test_rows_without_text_are_counted(tmp_path, caplog):
    datasets.Dataset.from_dict({"body": ["a", "", "b"] * 10}).save_to_disk(tmp_path / "one")
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        corpus = opened(tmp_path / "one", tmp_path)
    assert "left out 10 documents" in corpus.description
    assert f"the first document without text is {tmp_path}/one, row 1" in caplog.text


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


def test_without_the_library_the_pip_command_is_said(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="datasets package is not installed") as caught:
        opened(saved, tmp_path)
    assert caught.value.fix == "pip install datasets"


def test_which_sources_have_records(saved, tmp_path):
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "a.txt").write_text("text")
    assert has_records(str(saved)) and has_records(f"{tmp_path}/*")
    assert not has_records(f"{tmp_path}/*.txt") and not has_records("stdlib") and not has_records("module:Source")
