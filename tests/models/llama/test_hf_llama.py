"""Hugging Face conversion: exact round trips, equal outputs, and values of `config.json` read or rejected by key."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from meshwright.checkpoint import manifest, save_load
from meshwright.errors import CheckpointError, RunError
from meshwright.models.decoder.description import RopeScaling
from meshwright.models.decoder.module import Decoder
from meshwright.models.hf_format.checks import read_object
from meshwright.models.hf_format.weights import export_safetensors, import_safetensors
from meshwright.models.llama import hf_llama
from meshwright.models.llama.family import LlamaSpec
from meshwright.models.llama.hf_llama import LLAMA, config_from_model, model_from_config
from tests.models.hf_format import round_trip
from tests.models.hf_format.round_trip import edit_config, read, same, their_files

PLAIN = LlamaSpec(2, 32, 4, 2, 48, 64, 8, rope_theta=500000.0, norm_eps=1e-6)
SPECS = {
    "plain": PLAIN,
    "tied": replace(PLAIN, tie_embeddings=True),
    "scaled": replace(PLAIN, rope_scaling=RopeScaling(factor=8.0, original_seq_len=16)),
    "wide heads": replace(PLAIN, head_dim=16, num_kv_heads=4),
}


def build(spec):
    """Our Llama with random weights, large enough that every one of them shows in the output."""
    model = Decoder(spec)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return model


def weights(spec, dtype=torch.float32):
    """Its parameters, as a checkpoint names them."""
    return {f"model.{name}": parameter.detach().to(dtype) for name, parameter in build(spec).named_parameters()}


def save(root, spec, tensors=None, dtype=torch.float32):
    """A checkpoint with optimizer state beside the weights."""
    return round_trip.save(root, spec.identity(), weights(spec, dtype) if tensors is None else tensors)


@pytest.fixture(scope="module")
def exported_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    return export_safetensors(LLAMA, save(folder / "run", PLAIN), folder / "out")


@pytest.fixture
def exported(exported_once, tmp_path):
    """An exported model to change."""
    return shutil.copytree(exported_once, tmp_path / "exported")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_there_and_back_changes_no_bit(tmp_path, spec, dtype):
    path = save(tmp_path / "run", spec, dtype=dtype)
    out = export_safetensors(LLAMA, path, tmp_path / "out")
    back = import_safetensors(LLAMA, out, tmp_path / "imported")
    assert same(read(back), weights(spec, dtype))
    checked = manifest.verify(back)
    assert (checked.step, checked.run) == (0, {"imported_from": "out"})
    manifest.check_model(checked, spec.identity())
    again = export_safetensors(LLAMA, back, tmp_path / "again")
    assert same(their_files(again), their_files(out))
    assert (again / "config.json").read_bytes() == (out / "config.json").read_bytes()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_names_and_shapes_are_the_module_s(spec):
    model = spec.identity()
    ours = {name: tuple(parameter.shape) for name, parameter in build(spec).named_parameters()}
    assert {one.name: one.shape for one in LLAMA.tensors(model)} == ours


def test_an_imported_model_is_known_by_our_own_description(tmp_path):
    for i, spec in enumerate(SPECS.values()):
        config = hf_llama.config_from_model(spec.identity(), dtype="float32", max_seq_len=None)
        assert hf_llama.model_from_config(config, where=str(i)) == spec.identity()
        assert list(hf_llama.model_from_config(config, where="")) == list(spec.identity())


@pytest.mark.parametrize("max_shard_bytes", [1, 3000, 10**9])
def test_shards_are_as_large_as_allowed(tmp_path, max_shard_bytes):
    path = save(tmp_path / "run", PLAIN)
    out = export_safetensors(LLAMA, path, tmp_path / "out", max_shard_bytes=max_shard_bytes)
    names = sorted(file.name for file in out.glob("*.safetensors"))
    if max_shard_bytes == 10**9:
        assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors"]
    else:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert names == [f"model-{i + 1:05d}-of-{len(names):05d}.safetensors" for i in range(len(names))]
        assert set(index["weight_map"].values()) == set(names)
        assert all(name in load_file(out / file) for name, file in index["weight_map"].items())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in their_files(out).values())
        for file in names:
            tensors = load_file(out / file)
            assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= max_shard_bytes
    back = import_safetensors(LLAMA, out, tmp_path / "imported")
    assert same(read(back), weights(PLAIN))


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_transformers_loads_it_and_computes_the_same(tmp_path, spec):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    out = export_safetensors(LLAMA, save(tmp_path / "run", spec), tmp_path / "out", max_shard_bytes=20_000)
    model, info = transformers.LlamaForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    # What transformers itself writes comes back too.
    model.save_pretrained(tmp_path / "theirs")
    back = import_safetensors(LLAMA, tmp_path / "theirs", tmp_path / "imported")
    assert same(read(back), weights(spec))
    manifest.check_model(manifest.read_manifest(back), spec.identity())
    tokens_bt = torch.randint(0, spec.vocab_size, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, wanted = model.double()(tokens_bt).logits, build(spec).double()(tokens_bt)
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()  # transformers' frequencies are float32


def test_export_refuses_a_damaged_checkpoint(tmp_path):
    path = save(tmp_path / "run", PLAIN)
    file = path / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="rank-00000.safetensors has changed"):
        export_safetensors(LLAMA, path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_refuses_what_is_not_the_llama_of_its_manifest(tmp_path):
    whole = weights(PLAIN)
    norm, up = "model.blocks.1.ffn_norm.weight", "model.blocks.0.ffn.up.weight"
    cases = {
        "blocks.1.ffn_norm.weight is missing": {name: t for name, t in whole.items() if name != norm},
        "extra and 1 more are unexpected": {**whole, "model.extra": torch.ones(1), "model.second": torch.ones(1)},
        r"blocks.0.ffn.up.weight has shape \[32, 48\], expected \[48, 32\]": {**whole, up: whole[up].T.contiguous()},
    }
    for i, (words, tensors) in enumerate(cases.items()):
        with pytest.raises(CheckpointError, match=words):
            export_safetensors(LLAMA, save(tmp_path / str(i), PLAIN, tensors), tmp_path / "out")
    other = save_load.save(tmp_path / "moe", 1, {"model.w": torch.ones(1)}, model={"kind": "moe"}, run={}, keep=1)
    with pytest.raises(CheckpointError, match="not a Llama"):
        export_safetensors(LLAMA, other, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_never_writes_over_files(tmp_path):
    path = save(tmp_path / "run", PLAIN)
    out = tmp_path / "out"
    out.mkdir()
    export_safetensors(LLAMA, path, out)  # empty: fine
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    with pytest.raises(CheckpointError, match="not an empty directory"):
        export_safetensors(LLAMA, path, out)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch):
    path = save(tmp_path / "run", PLAIN)

    def fail(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fail)
        with pytest.raises(RunError, match="No space left"):
            export_safetensors(LLAMA, path, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
    (tmp_path / ".tmp-out").mkdir()
    (tmp_path / ".tmp-out" / "model.safetensors").write_text("of an export that was killed")
    export_safetensors(LLAMA, path, tmp_path / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "run"]


def test_the_context_length_is_what_was_asked_for(tmp_path):
    scaled = SPECS["scaled"].identity()
    for model, asked, wanted in ((PLAIN.identity(), None, 2048), (scaled, None, 128), (scaled, 99, 99)):
        config = hf_llama.config_from_model(model, dtype="float32", max_seq_len=asked)
        assert config["max_position_embeddings"] == wanted


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"]}, "not a Llama: model_type mistral"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "not a Llama"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "config.json has no rope_scaling.low_freq_factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type = 'yarn'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight and 8 more are missing"),
        ({"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight and 8 more are unexpected"),
        ({"tie_word_embeddings": True}, "lm_head.weight is unexpected"),
        ({"vocab_size": 65}, r"embed_tokens.weight has shape \[64, 32\], expected \[65, 32\]"),
        ({"num_key_value_heads": 4}, r"k_proj.weight has shape \[16, 32\], expected \[32, 32\]"),
    ],
)
def test_import_refuses_what_our_llama_is_not(exported, tmp_path, changes, words):
    edit_config(exported, **changes)
    with pytest.raises(CheckpointError, match=words):
        import_safetensors(LLAMA, exported, tmp_path / "imported")
    assert not manifest.list_checkpoints(tmp_path / "imported")


def test_import_reads_configurations_old_and_new(exported, tmp_path):
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    legacy = {"rope_parameters": "remove", "head_dim": "remove", "dtype": "remove"}
    modern = {"rope_theta": "remove", "rope_scaling": "remove", "torch_dtype": "remove"}
    wanted = asdict(RopeScaling(original_seq_len=16))
    cases = [
        (legacy, PLAIN.identity()),
        (modern, PLAIN.identity()),
        (legacy | {"rope_theta": "remove"}, PLAIN.identity() | {"rope_theta": 10000.0}),
        (legacy | {"rope_scaling": {"rope_type": "llama3", **scaling}}, PLAIN.identity() | {"rope_scaling": wanted}),
        (
            modern | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6, **scaling}},
            PLAIN.identity() | {"rope_scaling": wanted, "rope_theta": 1e6},
        ),
    ]
    for i, (changes, model) in enumerate(cases):
        source = shutil.copytree(exported, tmp_path / f"source{i}")
        edit_config(source, **changes)
        path = import_safetensors(LLAMA, source, tmp_path / f"imported{i}")
        assert manifest.read_manifest(path).model == model


def test_import_reads_no_pickle(exported, tmp_path):
    (exported / "model.safetensors").unlink()
    (exported / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(CheckpointError, match=r"only pytorch_model.bin") as caught:
        import_safetensors(LLAMA, exported, tmp_path / "imported")
    assert "safetensors" in caught.value.fix


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", None, "config.json is missing"),
        ("config.json", b"{", "config.json is not JSON"),
        ("config.json", b"[]", "config.json is not a JSON object"),
        ("model.safetensors", b"something else", "model.safetensors cannot be read"),
    ],
)
def test_files_that_cannot_be_read_are_named(exported, tmp_path, name, content, words):
    (exported / name).unlink()
    if content is not None:
        (exported / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        import_safetensors(LLAMA, exported, tmp_path / "imported")


def test_a_shard_that_is_missing_is_named(tmp_path):
    out = export_safetensors(LLAMA, save(tmp_path / "run", PLAIN), tmp_path / "out", max_shard_bytes=20_000)
    second = sorted(out.glob("*.safetensors"))[1]
    second.unlink()
    with pytest.raises(CheckpointError, match=f"{second.name} cannot be read"):
        import_safetensors(LLAMA, out, tmp_path / "imported")


def test_what_other_writers_add_is_understood(tmp_path):
    """Rotary frequencies of 2023, and a tied head stored a second time; a head of its own is not tied."""
    spec = SPECS["tied"]
    out = export_safetensors(LLAMA, save(tmp_path / "run", spec), tmp_path / "out")
    theirs = load_file(out / "model.safetensors")
    theirs["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    theirs["lm_head.weight"] = theirs["model.embed_tokens.weight"].clone()
    save_file(theirs, out / "model.safetensors")
    back = import_safetensors(LLAMA, out, tmp_path / "imported")
    assert same(read(back), weights(spec))
    theirs["lm_head.weight"] += 1
    save_file(theirs, out / "model.safetensors")
    with pytest.raises(CheckpointError, match="lm_head.weight is unexpected"):
        import_safetensors(LLAMA, out, tmp_path / "other")


def test_import_starts_a_new_run(exported, tmp_path):
    path = import_safetensors(LLAMA, exported, tmp_path / "imported")
    with pytest.raises(CheckpointError, match="already holds checkpoints"):
        import_safetensors(LLAMA, exported, tmp_path / "imported")
    manifest.verify(path)


MODEL = LlamaSpec(2, 32, 4, 2, 48, 64, 8, rope_scaling=RopeScaling(original_seq_len=16)).identity()
CONFIG = config_from_model(MODEL, dtype="float32", max_seq_len=None)
SCALING = CONFIG["rope_scaling"]
LEFT_OUT = object()


def changed(**changes):
    return {key: value for key, value in (CONFIG | changes).items() if value is not LEFT_OUT}


def scaled(**changes):
    return {"rope_scaling": SCALING | changes}


def refused(config):
    with pytest.raises(CheckpointError) as caught:
        model_from_config(config, where="hf/config.json")
    error = caught.value
    assert error.where.startswith("hf/config.json") and error.rule and error.fix
    return error


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rms_norm_eps": None}, "rms_norm_eps = None"),
        ({"rms_norm_eps": -1}, "rms_norm_eps = -1"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5'"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps = 1000"),
        ({"rope_theta": -1.0}, "rope_theta = -1.0"),
        ({"rope_scaling": "llama3"}, "rope_scaling = 'llama3'"),
        ({"rope_parameters": [1], "rope_scaling": None}, r"rope_parameters = [1]"),
        (scaled(factor="x"), "rope_scaling.factor = 'x'"),
        (scaled(rope_type=3), "rope_scaling.rope_type = 3"),
        (scaled(low_freq_factor=4.0), "rope_scaling.high_freq_factor = 4.0"),
        (scaled(original_max_position_embeddings=-5), "rope_scaling.original_max_position_embeddings = -5"),
        (scaled(original_max_position_embeddings=None) | {"max_position_embeddings": None}, "no max_position_embedd"),
        ({"architectures": [3]}, "architectures.0 = 3"),
        ({"model_type": LEFT_OUT}, "no model_type"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers = True"),
        ({"hidden_size": LEFT_OUT}, "no hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"head_dim": 7}, "head_dim = 7"),
        ({"head_dim": None, "hidden_size": 3}, "head_dim = 0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no'"),
        ({"quantization_config": {"a": "x" * 500}}, "quantization_config = "),
    ],
)
def test_a_value_that_can_not_be_is_named(changes, words):
    error = refused(changed(**changes))
    assert words in error.what and len(error.what) < 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(key=st.sampled_from(sorted(CONFIG)), inner=st.none() | st.sampled_from(sorted(SCALING)), value=JSON)
def test_whatever_stands_there_is_read_or_refused(key, inner, value):
    changes = {key: value} if inner is None else {"rope_scaling": SCALING | {inner: value}}
    try:
        model = model_from_config(changed(**changes), where="hf/config.json")
    except CheckpointError as error:
        assert error.where and error.rule and error.fix
    else:
        LlamaSpec(**{name: value for name, value in model.items() if name not in ("kind", "rope_scaling")})
        assert json.loads(json.dumps(model, allow_nan=False)) == model
        assert all(model[name] > 0 for name in ("num_layers", "dim", "head_dim", "norm_eps", "rope_theta"))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"num_key_value_heads": None}, {"num_kv_heads": 4}),
        ({"head_dim": None}, {}),
        ({"tie_word_embeddings": None}, {}),
        ({"tie_word_embeddings": True}, {"tie_embeddings": True}),
        ({"rms_norm_eps": LEFT_OUT}, {"norm_eps": 1e-6}),
        ({"rope_theta": None, "rope_parameters": None}, {}),
        ({"rope_theta": 5, "rope_scaling": SCALING | {"rope_theta": 7}}, {"rope_theta": 7.0}),
        (scaled(original_max_position_embeddings=LEFT_OUT), {}),
        ({"architectures": None}, {}),
        ({"rope_scaling": None, "rope_parameters": None}, {"rope_scaling": None}),
    ],
)
def test_null_and_left_out_as_transformers_takes_them(changes, found):
    if "rope_scaling" in changes and changes["rope_scaling"]:
        scaling = {key: value for key, value in changes["rope_scaling"].items() if value is not LEFT_OUT}
        changes = changes | {"rope_scaling": scaling, "max_position_embeddings": 16}
    assert model_from_config(changed(**changes), where="config.json") == MODEL | found


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff", b"3", b"null"])
def test_files_that_hold_no_object(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="config.json is not") as caught:
        read_object(tmp_path / "config.json")
    assert len(caught.value.what) < 300
