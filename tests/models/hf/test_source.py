"""Find what `model.config` names without torch, or refuse it with what to do."""

from __future__ import annotations

import json

import pytest

from meshwright.errors import ConfigError
from meshwright.models.hf import config
from meshwright.models.hf.config import find_source

pytest.importorskip("transformers")

FIELDS = {"model_type": "llama", "hidden_size": 64}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    return tmp_path


def test_a_folder_and_its_file_are_the_same_model(folder):
    found = find_source(str(folder))
    assert found == find_source(str(folder / "config.json"))
    assert found.model_type == "llama" and found.folder == folder
    assert found.identity() == {"model_type": "llama", "fields": FIELDS}


def test_the_order_of_fields_does_not_matter(folder):
    before = find_source(str(folder))
    (folder / "config.json").write_text(json.dumps(dict(reversed(FIELDS.items())), indent=4))
    assert find_source(str(folder)) == before


def test_a_type_has_no_folder():
    assert find_source("qwen3").identity() == {"model_type": "qwen3", "fields": None}
    assert find_source("qwen3").folder is None


def refusal(text):
    with pytest.raises(ConfigError) as caught:
        find_source(text)
    assert caught.value.where == "model.config"
    return caught.value


def test_a_name_on_the_hub_is_told_how_to_download(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = refusal("meta-llama/Llama-3.2-1B")
    assert "nothing is downloaded" in error.what
    assert "hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B" in error.fix
    assert "gated" in error.fix and "hf auth login" in error.fix
    assert error.fix.endswith("model.config=Llama-3.2-1B")


@pytest.mark.parametrize("text", ["./missing", "~/missing", "/missing/folder", "a/b/c", "missing.json"])
def test_a_path_that_does_not_exist_is_no_name_on_the_hub(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = refusal(text)
    assert "not found" in error.what and "download" not in error.fix


def test_a_folder_without_a_configuration(tmp_path):
    assert "has no config.json" in refusal(str(tmp_path)).what


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("{", "can't be read"),
        ("\udcff", "can't be read"),
        ("{}", "has no model_type"),
        ("[1]", "has no model_type"),
        ('{"model_type": 3}', "has no model_type"),
    ],
)
def test_what_is_no_configuration(folder, content, what):
    (folder / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    assert what in refusal(str(folder)).what


def test_transformers_missing_or_too_old(monkeypatch):
    monkeypatch.setattr(config, "transformers_version", lambda: "4.57.1")
    assert "4.57.1 is too old" in refusal("qwen3").what
    monkeypatch.setattr(config.importlib.util, "find_spec", lambda name: None)
    error = refusal("qwen3")
    assert "not installed" in error.what and "pip install 'transformers>=5,<6'" in error.fix
