"""`model.weights=auto`, and what plans, proofs and runs say of a model of transformers before they start."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.config.resolve import notes_of
from meshwright.config.source import to_toml
from meshwright.errors import ConfigError
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
