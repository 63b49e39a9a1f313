"""A Mixtral of transformers as a model and a run of ours: the same logits, and training on experts of several ranks."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from safetensors.torch import load_file

from meshwright.checkpoint import manifest, save_load
from meshwright.checkpoint.manifest import list_checkpoints, read_manifest
from meshwright.models.huggingface.weights import import_safetensors
from meshwright.models.moe.description import MoeSpec
from meshwright.models.moe.family import MoeConfig
from meshwright.models.moe.hf_mixtral import MIXTRAL
from meshwright.models.moe.module import MoeTransformer
from tests.helpers import small_corpus

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
    stored = save_load.read_tensors(path, save_load.tensor_names(path))
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
