"""Mixtral in Hugging Face's format: exact round trips, equal logits, runs, and damage and values that are named."""

from __future__ import annotations

import shutil
from dataclasses import fields

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.checkpoint import manifest, save_load
from meshwright.checkpoint.manifest import list_checkpoints, read_manifest
from meshwright.errors import CheckpointError
from meshwright.models.hf_format.weights import export_safetensors, import_safetensors
from meshwright.models.moe.description import MoeSpec
from meshwright.models.moe.family import MoeConfig
from meshwright.models.moe.hf_mixtral import MIXTRAL, ROUTING, check_is_mixtral, config_from_model, model_from_config
from meshwright.models.moe.module import MoeTransformer
from tests.helpers import small_corpus
from tests.models.hf_format import round_trip
from tests.models.hf_format.round_trip import edit_config, read, same, their_files

MODEL = {
    "kind": "moe",
    "num_layers": 2,
    "dim": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "ffn_dim": 24,
    "vocab_size": 64,
    "rope_theta": 1e6,
    "norm_eps": 1e-5,
    "tie_embeddings": False,
    "num_experts": 4,
    "top_k": 2,
    "expert_dim": 24,
    **ROUTING,
}
CONFIG = config_from_model(MODEL, dtype="float32", max_seq_len=None)
LEFT_OUT = object()
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
    return round_trip.save(root, model, weights(model, dtype) if tensors is None else tensors)


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


def test_what_is_not_a_mixtral_is_not_exported(tmp_path):
    path = save(tmp_path / "run", MODEL | {"score": "sigmoid"})
    with pytest.raises(CheckpointError, match="not a Mixtral: model.score = ") as caught:
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


def changed(**changes):
    return {key: value for key, value in (CONFIG | changes).items() if value is not LEFT_OUT}


def test_written_and_read_back_it_is_the_same():
    for changes in ({}, {"tie_embeddings": True}, {"head_dim": 16, "top_k": 1, "num_experts": 1}):
        config = config_from_model(MODEL | changes, dtype="bfloat16", max_seq_len=99)
        assert model_from_config(config, where="config.json") == MODEL | changes
        assert (config["max_position_embeddings"], config["dtype"]) == (99, "bfloat16")


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"rope_theta": 5.0, "rope_parameters": LEFT_OUT}, {"rope_theta": 5.0}),
        ({"rope_theta": LEFT_OUT, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope_theta": 7.0}),
        ({"num_local_experts": LEFT_OUT}, {"num_experts": 8}),
        ({"num_experts_per_tok": LEFT_OUT}, {}),
        ({"rms_norm_eps": LEFT_OUT}, {}),
        ({"num_key_value_heads": LEFT_OUT, "num_attention_heads": 8, "head_dim": 4},
         {"num_heads": 8, "num_kv_heads": 8, "head_dim": 4}),
        ({"sliding_window": 2048}, {}),
        ({"sliding_window": LEFT_OUT, "max_position_embeddings": LEFT_OUT}, {}),
        ({"router_aux_loss_coef": 0.5, "router_jitter_noise": 0.1, "output_router_logits": True}, {}),
    ],
)  # fmt: skip
def test_null_and_left_out_as_transformers_takes_them(changes, found):
    assert model_from_config(changed(**changes), where="config.json") == MODEL | found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"]}, "not a Mixtral: model_type qwen2_moe"),
        ({"architectures": ["MixtralForSequenceClassification"]}, "not a Mixtral: model_type mixtral"),
        ({"sliding_window": 2047}, "sliding_window = 2047 is not supported"),
        ({"sliding_window": 4096, "max_position_embeddings": LEFT_OUT}, "config.json has no max_position_embeddings"),
        ({"sliding_window": "all"}, "sliding_window = 'all'"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok = 5 is not supported"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok = 0"),
        ({"num_local_experts": None}, "num_local_experts = None"),
        ({"num_local_experts": 2.5}, "num_local_experts = 2.5"),
    ],
)
def test_what_our_model_is_not_is_refused_by_key(changes, words):
    with pytest.raises(CheckpointError) as caught:
        model_from_config(changed(**changes), where="hf/config.json")
    error = caught.value
    assert words in error.what and error.where.startswith("hf/config.json") and error.rule and error.fix


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_dense_layers", 1), ("num_shared_experts", 1), ("score", "sigmoid"), ("normalize", False),
     ("route_scale", 2.5), ("num_groups", 2), ("top_groups", 2), ("balance_bias", True),
     ("rope_scaling", {"factor": 8.0})],
)  # fmt: skip
def test_any_other_mixture_of_experts_is_not_a_mixtral(key, value):
    check_is_mixtral(MODEL, where="run")
    with pytest.raises(CheckpointError) as caught:
        check_is_mixtral(MODEL | {key: value}, where="run")
    error = caught.value
    assert f"model.{key} = " in error.what and f"model.{key} = " in error.rule and error.where == "run" and error.fix


def test_all_that_differs_is_named_at_once():
    with pytest.raises(CheckpointError) as caught:
        check_is_mixtral(MODEL | {"score": "sigmoid", "balance_bias": True}, where="run")
    assert caught.value.what == "the model is not a Mixtral: model.score = sigmoid, model.balance_bias = true"
    assert caught.value.rule.endswith("it has model.score = softmax, model.balance_bias = false")


WORDS = ["train.steps=1", "train.lr=0.01", "train.weight_decay=0", "train.global_batch=2", "train.seq_len=8",
         "train.warmup_steps=0", "train.threads=1", "train.sample_tokens=0", "train.validation_samples=0"]  # fmt: skip


def mixtral(out, **changes):
    """What transformers writes of a random Mixtral for bytes, large enough that every weight shows in the logits."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    options = {
        "vocab_size": 256, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
        "max_position_embeddings": 64, "initializer_range": 0.25,
    }  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**(options | changes)))
    if hasattr(model, "set_experts_implementation"):  # transformers 5
        model.set_experts_implementation("eager")  # the others have no float64
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.25)
    model.save_pretrained(out)
    return model


def section(model):
    """The model section of an imported description."""
    return MoeConfig(**{name: value for name, value in model.items() if name in MoeConfig.model_fields})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_experts_per_tok": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"num_experts_per_tok": 8, "rms_norm_eps": 1e-2, "num_key_value_heads": 4, "head_dim": 16},
        {"tie_word_embeddings": True},
    ],
    ids=["plain", "one expert", "all experts", "tied"],
)
def test_logits_are_those_of_transformers(tmp_path, changes):
    theirs = mixtral(tmp_path / "theirs", **changes)
    path = import_safetensors(MIXTRAL, tmp_path / "theirs", tmp_path / "imported")
    config = section(read_manifest(path).model)
    ours = MoeTransformer(config.spec(), config.router())
    stored = read(path)
    state = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    if config.tie_embeddings:
        ours.head.weight = ours.embed.weight
        state["head.weight"] = state["embed.weight"]
    ours.load_state_dict(state)
    tokens_bt = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for dtype in (torch.float32, torch.float64):  # transformers' router and frequencies are float32 in both
            found, wanted = ours.to(dtype)(tokens_bt), theirs.to(dtype)(tokens_bt).logits
            difference = (found - wanted).abs().max() / wanted.abs().max()
            assert difference < 1e-5, (dtype, difference)


def test_the_description_is_our_own_and_complete(tmp_path):
    mixtral(tmp_path / "theirs")
    checked = read_manifest(import_safetensors(MIXTRAL, tmp_path / "theirs", tmp_path / "imported"))
    spec = MoeSpec(
        **{field.name: checked.model[field.name] for field in fields(MoeSpec) if field.name in checked.model}
    )
    manifest.check_model(checked, spec.identity())
    assert section(checked.model).spec() == spec
    ours = dict(MoeTransformer(spec, section(checked.model).router()).named_parameters())
    assert {one.name: one.shape for one in MIXTRAL.tensors(checked.model)} == {n: p.shape for n, p in ours.items()}


def assert_changed_where_tokens_went(path, before, after):
    """Experts have changed if the counter of their tokens has; the others are as they were, bit for bit."""
    used = []
    for layer in range(2):
        name = f"model.blocks.{layer}.moe.router.load.value"
        load = save_load.read_tensors(path, [name])[name].tolist()
        assert sum(load) == 2 * 8
        for expert, count in enumerate(load):
            prefix = f"model.layers.{layer}.block_sparse_moe.experts.{expert}."
            equal = [
                torch.equal(before[prefix + w], after[prefix + w]) for w in ("w1.weight", "w2.weight", "w3.weight")
            ]
            assert equal == [count == 0] * 3, (layer, expert, count)
            used.append(count > 0)
    assert any(used) and not all(used)


@pytest.mark.slow
def test_the_command_imports_trains_and_exports(forked_meshwright, tmp_path):
    """Training on experts of several ranks changes no bit of those without tokens."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    mixtral(tmp_path / "theirs", num_experts_per_tok=1)
    done = forked_meshwright("checkpoint", "import", "theirs", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = next(line for line in done.stdout.splitlines() if line.startswith("model  ")).split()[1:]
    words = ["run", *told, *small_corpus(tmp_path / "corpus"), *WORDS, "mesh.dp_shard=2", "mesh.ep=2"]
    done = forked_meshwright("run", *words, cwd=tmp_path)
    assert done.returncode == 0 and "holds weights only" in done.stdout + done.stderr, done.stderr
    done = forked_meshwright("checkpoint", "export", "run", "back", cwd=tmp_path)
    assert done.returncode == 0 and "00000001" in done.stdout, done.stderr
    _, info = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]

    path = list_checkpoints(tmp_path / "run/checkpoints")[-1]
    before, after = load_file(tmp_path / "theirs/model.safetensors"), load_file(tmp_path / "back/model.safetensors")
    assert before.keys() == after.keys()
    assert_changed_where_tokens_went(path, before, after)
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])
    seen = (before["model.embed_tokens.weight"] != after["model.embed_tokens.weight"]).any(1).sum()
    assert 0 < seen <= 16  # rows of the tokens of the one step
