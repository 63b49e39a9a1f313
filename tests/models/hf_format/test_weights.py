"""Hugging Face weight files: consistent with the index, with trainable dtypes, in a folder that can be imported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.checkpoint import manifest, save_load
from meshwright.errors import CheckpointError
from meshwright.models.hf_format.checks import check_source
from meshwright.models.hf_format.weights import (
    INDEX,
    SINGLE_FILE,
    export_safetensors,
    import_safetensors,
    open_weights,
)
from meshwright.models.llama.family import LlamaSpec
from meshwright.models.llama.hf_llama import LLAMA
from tests.models.specs import build as build_model

SPEC = LlamaSpec(2, 32, 4, 2, 48, 64, 8)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    model = build_model(SPEC, dtype=torch.float32)
    tensors = {f"model.{name}": torch.randn(p.shape) for name, p in model.named_parameters()}
    return save_load.save(tmp_path_factory.mktemp("run"), 1, tensors, model=SPEC.identity(), run={}, keep=1)


@pytest.fixture
def whole(run_folder, tmp_path):
    """Exported as one file."""
    return export_safetensors(LLAMA, run_folder, tmp_path / "whole")


@pytest.fixture
def shards(run_folder, tmp_path):
    """Exported as several files."""
    return export_safetensors(LLAMA, run_folder, tmp_path / "shards", max_shard_bytes=20_000)


def refused(source, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        import_safetensors(LLAMA, source, tmp_path / "imported")
    assert caught.value.where and caught.value.rule and caught.value.fix
    assert not manifest.list_checkpoints(tmp_path / "imported")
    return caught.value


def edit(path, change):
    """Changes a JSON or safetensors file in place."""
    if path.suffix == ".json":
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))
    else:
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)


@pytest.mark.parametrize("weight_map", [["a"], {"a": 3}, {"a": None}, "a", None, {"a": ["b"]}])
def test_an_index_that_is_none_is_refused(shards, tmp_path, weight_map):
    edit(shards / INDEX, lambda content: content.update(weight_map=weight_map))
    error = refused(shards, tmp_path)
    assert INDEX in error.what and "weight_map" in error.what


def test_an_index_without_its_map_is_refused(shards, tmp_path):
    edit(shards / INDEX, lambda content: content.pop("weight_map"))
    assert refused(shards, tmp_path).what == f"{INDEX} has no weight_map"


def test_a_tensor_in_two_files_is_refused_until_one_is_gone(shards, tmp_path):
    weight_map = json.loads((shards / INDEX).read_text())["weight_map"]
    name, home = next(iter(weight_map.items()))
    other = next(file for file in weight_map.values() if file != home)
    edit(shards / other, lambda tensors: tensors.update({name: torch.zeros(64, 32)}))
    error = refused(shards, tmp_path)
    assert error.what == f"{name} is in {other}, but the index names {home}"
    edit(shards / other, lambda tensors: tensors.pop(name))
    import_safetensors(LLAMA, shards, tmp_path / "imported")


def test_an_index_that_names_another_file_is_refused(shards, tmp_path):
    weight_map = json.loads((shards / INDEX).read_text())["weight_map"]
    name, home = next(iter(weight_map.items()))
    other = next(file for file in weight_map.values() if file != home)
    edit(shards / INDEX, lambda content: content["weight_map"].update({name: other}))
    assert name in refused(shards, tmp_path).what
    edit(shards / INDEX, lambda content: content["weight_map"].pop(name))
    assert refused(shards, tmp_path).what == f"{name} is in {home}, but not in the index"


def test_both_forms_hold_the_same(whole, shards):
    with open_weights(whole) as one, open_weights(shards) as several:
        assert set(one) == set(several) and all(torch.equal(one[name], several[name]) for name in one)


@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn,
     torch.float8_e5m2],
    ids=str,
)  # fmt: skip
def test_numbers_that_are_no_weights_are_refused_by_name(whole, tmp_path, dtype):
    name = "model.layers.1.mlp.up_proj.weight"

    def change(tensors, to=dtype):
        tensors[name] = torch.ones(tensors[name].shape, dtype=to)

    edit(whole / SINGLE_FILE, change)
    error = refused(whole, tmp_path)
    assert error.what == f"{name} has dtype {str(dtype).removeprefix('torch.')}" and "as bfloat16" in error.fix
    edit(whole / SINGLE_FILE, lambda tensors: change(tensors, torch.bfloat16))
    import_safetensors(LLAMA, whole, tmp_path / "imported")


def test_more_layers_than_tensors_are_refused_without_counting_them(whole, tmp_path):
    """Names of a billion layers would not fit into memory."""
    edit(whole / "config.json", lambda content: content.update(num_hidden_layers=10**9))
    assert "num_hidden_layers = 1000000000, but there are 21 tensors" in refused(whole, tmp_path).what


def source_refused(source, out="runs/new"):
    with pytest.raises(CheckpointError) as caught:
        check_source(source, out)
    return caught.value


def test_a_name_on_the_hub_is_answered_with_its_download(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = source_refused(Path("meta-llama/Llama-3.1-8B"))
    assert "nothing is downloaded" in error.rule
    assert error.fix.startswith(
        "hf download meta-llama/Llama-3.1-8B --local-dir Llama-3.1-8B (after hf auth login, if it is gated), "
        "then meshwright checkpoint import Llama-3.1-8B runs/new"
    )
    (tmp_path / "runs").mkdir()
    assert "hf download" not in source_refused(Path("runs/other")).fix  # a path with a typing error
    (tmp_path / "meta-llama/Llama-3.1-8B").mkdir(parents=True)
    (tmp_path / "meta-llama/Llama-3.1-8B/config.json").write_text("{}")
    check_source(Path("meta-llama/Llama-3.1-8B"), Path("runs/new"))  # a folder of that name


def test_a_path_that_is_no_folder(tmp_path):
    assert "folder not found" in source_refused(tmp_path / "nothing").what
    (tmp_path / "config.json").write_text("{}")
    error = source_refused(tmp_path / "config.json")
    assert "is a file" in error.what and error.fix == f"meshwright checkpoint import {tmp_path} runs/new"


@pytest.mark.parametrize("inside", ["model", "snapshots/0e9e39f"])
def test_a_folder_above_the_model_is_answered_with_the_model(tmp_path, inside):
    error = source_refused(tmp_path)
    assert error.what == f"config.json is missing from {tmp_path}" and "download" in error.fix
    (tmp_path / inside).mkdir(parents=True)
    (tmp_path / inside / "config.json").write_text("{}")
    assert source_refused(tmp_path).fix == f"meshwright checkpoint import {tmp_path / inside} runs/new"
