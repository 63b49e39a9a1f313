"""Texts of the user's own code, and everything that can be wrong with them."""

from __future__ import annotations

import logging
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from meshwright.data.sources.source_text import EmptyTexts
from meshwright.data.sources.text_source import split_indices
from meshwright.data.sources.user_source import read_texts
from meshwright.data.text_corpus import open_corpus
from meshwright.data.text_documents import is_own
from meshwright.errors import ConfigError, DataError
from tests.helpers import clean_environment
from tests.train.runs import metrics

EXAMPLE = Path(__file__).parents[2] / "docs/examples/own_data.py"
HERE = "tests.data.test_user_source"


class Numbers:
    """A document per number; tests replace what the class has."""

    identity = "numbers"
    number = 120

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        return f"document {index} " * 5


def opened(folder, name="Numbers", **more):
    return open_corpus(
        f"{HERE}:{name}", tokenizer="bytes", token_dtype="uint16", cache_dir=str(folder / "cache"), **more
    )


def splits():
    documents = Numbers()
    for part in split_indices(len(documents)):
        texts = read_texts(documents, part, EmptyTexts(), source="x")
        yield [int(text.split()[1]) for text in texts]


@pytest.mark.parametrize("number", [0, 1, 9, 10, 40, 1000])
def test_every_document_is_in_one_split_in_its_order(monkeypatch, number):
    monkeypatch.setattr(Numbers, "number", number)
    train, held_out = splits()
    assert sorted(train + held_out) == list(range(number))
    assert train == sorted(train) and held_out == sorted(held_out)
    assert abs(len(held_out) - number / 10) <= 0.03 * number + 1


def test_adding_documents_moves_none(monkeypatch):
    _, before = splits()
    monkeypatch.setattr(Numbers, "number", 500)
    _, after = splits()
    assert [index for index in after if index < 120] == before and len(after) > len(before)


def test_texts_are_read_once_and_each_is_a_document(monkeypatch, tmp_path):
    corpus = opened(tmp_path, with_documents=True)
    ends = [*corpus.train_documents.ends, *corpus.validation_documents.ends]
    assert len(ends) == 120 and "120 documents of" in corpus.description
    monkeypatch.setattr(Numbers, "__getitem__", None)
    assert opened(tmp_path).train.tolist() == corpus.train.tolist(), "from the cache"
    monkeypatch.undo()
    monkeypatch.setattr(Numbers, "identity", "others")
    monkeypatch.setattr(Numbers, "__getitem__", lambda self, index: f"other {index} " * 5)
    assert bytes(opened(tmp_path).train[:5].astype(np.uint8)) == b"other"


def raises(error):
    def body(self, *arguments):
        raise error

    return body


WRONG = {
    "no identity": ("identity", "", "identity is ''"),
    "an identity that is none": ("identity", 3, "identity is 3"),
    "no documents": ("number", 0, "has no documents"),
    "bytes": ("__getitem__", lambda self, index: b"a" if index == 7 else "a" * 9, "[7] is of type bytes, not str"),
    "a zero character": ("__getitem__", lambda self, index: "a\0b" * 9, "[0] has a zero character"),
    "half a pair": ("__getitem__", lambda self, index: "\ud83d" * 9, "[0] has half a surrogate pair"),
    "a document that raises": ("__getitem__", raises(KeyError("row 5")), "[0] raises KeyError('row 5')"),
    "a length that raises": ("__len__", raises(OSError("gone")), "raises OSError('gone')"),
    "a constructor that raises": ("__init__", raises(KeyError("NOTES")), "raises KeyError('NOTES')"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(monkeypatch, tmp_path, name):
    member, value, says = WRONG[name]
    monkeypatch.setattr(Numbers, member, value)
    with pytest.raises(DataError) as caught:
        opened(tmp_path)
    assert says in caught.value.what and "own_data.py" in caught.value.fix
    assert not list((tmp_path / "cache").glob("*.tokens"))


def test_other_objects_and_names_are_refused(tmp_path):
    with pytest.raises(DataError, match="has no identity and no __len__ and no __getitem__"):
        opened(tmp_path, "object_of_no_kind")
    with pytest.raises(ConfigError) as caught:
        opened(tmp_path, "Number")
    assert caught.value.fix == f"data.source={HERE}:Numbers"
    with pytest.raises(ConfigError, match="module not found: no_such"):
        open_corpus("no_such.module:Source", tokenizer="bytes", token_dtype="uint16", cache_dir=str(tmp_path))
    with pytest.raises(DataError, match="has no effect"):
        opened(tmp_path, text_field="text")


def object_of_no_kind():
    return object()


def test_a_file_of_such_a_name_is_a_file(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert is_own("a.b:C") and not is_own("a/*.txt") and not is_own("C:/texts/a.txt")
    (tmp_path / "a.b:C").write_text("a" * 100)
    assert not is_own("a.b:C")
    assert len(open_corpus("a.b:C", tokenizer="bytes", token_dtype="uint16", cache_dir=str(tmp_path)).train) == 91


def test_empty_documents_are_counted(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(Numbers, "__getitem__", lambda self, index: "" if index in (3, 4) else "a" * 9)
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        corpus = opened(tmp_path)
    assert f"the first document without text is {HERE}:Numbers[3]" in caplog.text
    assert "left out 2 documents:" in corpus.description


def database(folder):
    rows = sqlite3.connect(folder / "notes.db")
    rows.execute("CREATE TABLE notes (id INTEGER PRIMARY KEY, text TEXT)")
    rows.executemany("INSERT INTO notes VALUES (?, ?)", [(7 * n, f"note {n} of many\n" * 20) for n in range(200)])
    rows.commit()
    rows.close()


@pytest.mark.slow
def test_the_example_runs_from_outside_and_resumes_on_another_layout(forked_meshwright, tmp_path):
    assert len(EXAMPLE.read_text("utf-8").splitlines()) <= 40
    shutil.copy(EXAMPLE, tmp_path)
    database(tmp_path)
    words = ["train.validation_samples=8", "train.sample_tokens=0", "model.num_layers=1", "train.global_batch=4",
             "data.source=own_data:Notes", f"data.cache_dir={tmp_path / 'cache'}"]  # fmt: skip
    environment = clean_environment(OMP_NUM_THREADS="1", PYTHONPATH=str(tmp_path), NOTES=str(tmp_path / "notes.db"))
    for steps, layout in ((2, ["mesh.dp_shard=2"]), (4, ["mesh.tp=2", "--resume", "auto"])):
        more = [*words, *layout, f"train.steps={steps}", "--out", tmp_path / "run"]
        done = forked_meshwright("run", "llama-tiny", *more, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4]
    assert np.isfinite([line["loss"] for line in metrics(tmp_path / "run")]).all()
