"""What `model.config` names, found without torch; `model.weights=auto`; and what is said of them before a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.config.resolve import notes_of
from meshwright.config.source import to_toml
from meshwright.errors import ConfigError
from meshwright.models.hf import config
from meshwright.models.hf.config import find_source
from meshwright.plan.rules import load
from tests.models.hf.folders import change_config, write_model
from tests.models.hf.runs import hf_config

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("here") / "model", "qwen3")


def test_auto_takes_a_folder_s_weights_and_tokenizer(folder: Path, tmp_path: Path) -> None:
    found = hf_config(str(folder))
    assert (found.model.weights, found.data.tokenizer) == ("folder", str(folder))
    assert next(notes_of(found)) == f"initial weights and tokenizer: those of {folder}"
    (tmp_path / "config.toml").write_text(to_toml(found), "utf-8")
    for path in folder.glob("*.safetensors"):
        path.rename(path.with_suffix(".away"))
    try:
        assert load(str(tmp_path / "config.toml"), []) == found, "decided once"
        assert hf_config(str(folder)).model.weights == "random"
    finally:
        for path in folder.glob("*.away"):
            path.rename(path.with_suffix(".safetensors"))


def test_words_decide_before_a_folder(folder: Path) -> None:
    with pytest.raises(ConfigError) as found:
        hf_config(str(folder), "data.tokenizer=bytes")
    assert found.value.fix == f"data.tokenizer={folder}"
    config = hf_config(str(folder), "model.weights=random")
    assert (config.model.weights, config.data.tokenizer) == ("random", "bytes")
    assert next(notes_of(config)) == f"initial weights: random, though {folder} has some (model.weights=folder)"


@pytest.mark.parametrize("lacks", ["weights", "all but adapters", "a folder", "a type"])
def test_without_a_folder_s_weights_they_are_random(folder: Path, lacks: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    if lacks == "all but adapters":
        (tmp_path / "adapter_model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    name = {"a type": "qwen3", "a folder": f"{folder}/config.json"}.get(lacks, str(tmp_path))
    found = hf_config(name)
    assert (found.model.weights, found.data.tokenizer) == ("random", "bytes")
    assert next(notes_of(found)).startswith("initial weights: random")


def test_dropout_of_a_configuration_is_said_to_be_set_aside(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "qwen3", tokenizer=False)
    change_config(folder, attention_dropout=0.1)
    assert list(notes_of(hf_config(str(folder))))[1:] == ["dropout is set aside: attention_dropout = 0.1"]


FIELDS = {"model_type": "llama", "hidden_size": 64}


@pytest.fixture
def bare(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    return tmp_path


def test_a_folder_and_its_file_are_the_same_model(bare):
    found = find_source(str(bare))
    assert found == find_source(str(bare / "config.json"))
    assert found.model_type == "llama" and found.folder == bare
    assert found.identity() == {"model_type": "llama", "fields": FIELDS}


def test_the_order_of_fields_does_not_matter(bare):
    before = find_source(str(bare))
    (bare / "config.json").write_text(json.dumps(dict(reversed(FIELDS.items())), indent=4))
    assert find_source(str(bare)) == before


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
def test_what_is_no_configuration(bare, content, what):
    (bare / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    assert what in refusal(str(bare)).what


def test_transformers_missing_or_too_old(monkeypatch):
    monkeypatch.setattr(config, "transformers_version", lambda: "4.57.1")
    assert "4.57.1 is too old" in refusal("qwen3").what
    monkeypatch.setattr(config.importlib.util, "find_spec", lambda name: None)
    error = refusal("qwen3")
    assert "not installed" in error.what and "pip install 'transformers>=5,<6'" in error.fix
