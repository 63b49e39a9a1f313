"""Mixtral in Hugging Face's format: exact round trips both ways, and damage that is named."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.checkpoint import manifest, save_load
from meshwright.errors import CheckpointError
from meshwright.models.huggingface.weights import export_safetensors, import_safetensors
from meshwright.models.moe.hf_mixtral import MIXTRAL
from tests.models.moe.test_hf_config import MODEL

COUNTERS = {f"model.{name}" for name in MIXTRAL.counters(MODEL)}
W1 = "model.layers.1.block_sparse_moe.experts.2.w1.weight"


def weights(model=MODEL, dtype=torch.float32):
    """Random parameters, and the counters of a run."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"model.{one.name}": (torch.randn(one.shape, generator=generator) / 4).to(dtype)
        for one in MIXTRAL.tensors(model)
    }
    return tensors | {f"model.{name}": torch.arange(*shape) for name, shape in MIXTRAL.counters(model).items()}


def save(root, model=MODEL, tensors=None, dtype=torch.float32):
    """A checkpoint with optimizer state beside the weights."""
    tensors = weights(model, dtype) if tensors is None else tensors
    state = {f"optimizer.exp_avg.{name}": torch.ones_like(tensor) for name, tensor in tensors.items()}
    return save_load.save(root, 5, {**tensors, **state}, model=model, run={}, keep=9)


def read(path):
    return save_load.read_tensors(path, save_load.tensor_names(path))


def their_files(out):
    return {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(left, right):
    return set(left) == set(right) and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


@pytest.fixture(scope="module")
def theirs_once(tmp_path_factory):
    """What transformers writes of a random Mixtral."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
        initializer_range=0.25,
    )  # fmt: skip
    torch.manual_seed(0)
    out = tmp_path_factory.mktemp("theirs")
    transformers.MixtralForCausalLM(config).save_pretrained(out)
    return out


@pytest.fixture
def theirs(theirs_once, tmp_path):
    """The same, to change."""
    return shutil.copytree(theirs_once, tmp_path / "theirs")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_ours_there_and_back_changes_no_bit(tmp_path, tie, dtype):
    model = MODEL | {"tie_embeddings": tie}
    out = export_safetensors(MIXTRAL, save(tmp_path / "run", model, dtype=dtype), tmp_path / "out")
    back = import_safetensors(MIXTRAL, out, tmp_path / "imported")
    found, wanted = read(back), weights(model, dtype)
    assert same(found, wanted | {name: torch.zeros(4, dtype=torch.int64) for name in COUNTERS})
    checked = manifest.verify(back)
    manifest.check_model(checked, model)
    assert (checked.step, checked.run) == (0, {"imported_from": "out"})


def test_theirs_there_and_back_changes_no_bit(theirs, tmp_path):
    """Files of transformers, ours of them, and what transformers loads from those."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    path = import_safetensors(MIXTRAL, theirs, tmp_path / "imported")
    out = export_safetensors(MIXTRAL, path, tmp_path / "out", max_shard_bytes=20_000)
    assert len(list(out.glob("*.safetensors"))) > 1
    assert same(their_files(out), their_files(theirs))
    model, info = transformers.MixtralForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    original = transformers.MixtralForCausalLM.from_pretrained(theirs)
    assert same(model.state_dict(), original.state_dict())
    assert manifest.read_manifest(path).model == MODEL


def test_experts_are_stacked_in_their_order(theirs, tmp_path):
    files, found = their_files(theirs), read(import_safetensors(MIXTRAL, theirs, tmp_path / "imported"))
    for ours, name in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        for j in range(4):
            expected = files[f"model.layers.1.block_sparse_moe.experts.{j}.{name}.weight"]
            assert torch.equal(found[f"model.blocks.1.moe.experts.{ours}"][j], expected)


def edit_weights(source, change):
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors")


def edit_config(source, **changes):
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused(source, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        import_safetensors(MIXTRAL, source, tmp_path / "imported")
    error = caught.value
    assert error.where and error.rule and error.fix and not manifest.list_checkpoints(tmp_path / "imported")
    return error.what


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(W1), f"tensor {W1} is missing"),
        (lambda t: t.update({W1.replace(".2.", ".4."): t[W1].clone()}), f"{W1.replace('.2.', '.4.')} is unexpected"),
        (lambda t: t.update({W1: t[W1].T.contiguous()}), f"{W1} has shape [32, 24], expected [24, 32]"),
        (lambda t: t.update({W1: t[W1].to(torch.int8)}), f"{W1} has dtype int8"),
        (lambda t: t.update({W1: t[W1].bfloat16()}), f"{W1} has dtype bfloat16, but {W1.replace('.2.', '.0.')} has"),
    ],
    ids=["missing", "one too many", "shape", "integers", "another dtype"],
)  # fmt: skip
def test_an_expert_that_is_wrong_is_named(theirs, tmp_path, change, words):
    edit_weights(theirs, change)
    assert words in refused(theirs, tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sliding_window": 32}, "sliding_window = 32 is not supported"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "not a Mixtral: model_type llama"),
        ({"num_local_experts": 3}, "and 5 more are unexpected"),
        ({"num_local_experts": 10**9}, "num_local_experts = 1000000000, but there are 41 tensors"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000, but there are 41 tensors"),
        ({"intermediate_size": 48}, "experts.0.w1.weight has shape [24, 32], expected [48, 32]"),
    ],
)  # fmt: skip
def test_a_configuration_that_does_not_match_is_refused(theirs, tmp_path, changes, words):
    edit_config(theirs, **changes)
    assert words in refused(theirs, tmp_path)


@pytest.mark.parametrize("key, value", [("num_shared_experts", 1), ("balance_bias", True), ("score", "sigmoid")])
def test_what_is_not_a_mixtral_is_not_exported(tmp_path, key, value):
    path = save(tmp_path / "run", MODEL | {key: value})
    with pytest.raises(CheckpointError, match=f"not a Mixtral: model.{key} = ") as caught:
        export_safetensors(MIXTRAL, path, tmp_path / "out")
    assert caught.value.where == str(path) and not (tmp_path / "out").exists()


def test_export_refuses_another_model_than_its_manifest_s(tmp_path):
    whole, name = weights(), "model.blocks.1.moe.experts.up"
    cases = {
        "blocks.1.moe.experts.up is missing": {key: tensor for key, tensor in whole.items() if key != name},
        r"shape \[3, 24, 32\], expected \[4, 24, 32\]": whole | {name: whole[name][:3]},
        "extra is unexpected": whole | {"model.extra": torch.ones(1)},
    }
    for i, (words, tensors) in enumerate(cases.items()):
        with pytest.raises(CheckpointError, match=words):
            export_safetensors(MIXTRAL, save(tmp_path / str(i), tensors=tensors), tmp_path / "out")
    other = save_load.save(tmp_path / "other", 1, {"model.w": torch.ones(1)}, model={"kind": "x"}, run={}, keep=1)
    with pytest.raises(CheckpointError, match="of a x, not a Mixtral"):
        export_safetensors(MIXTRAL, other, tmp_path / "out")
