"""Adapters train in place of the model's own weights, on any layout, and peft opens what is exported."""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint import safetensors_file
from meshwright.checkpoint.manifest import Manifest, newest_valid
from meshwright.checkpoint.reader import read_tensor
from meshwright.config.facts_for_family import model_facts, run_facts
from meshwright.errors import CheckpointError, ConfigError
from meshwright.models.contract.family import find_family
from meshwright.models.contract.model_facts import Uniform
from meshwright.models.hf.config import is_adapter, original_name
from meshwright.models.hf.family import FAMILY
from meshwright.models.hf.pretrained import TransformersWeights
from meshwright.models.hf_format.weights import PREFIX
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory import predict_memory
from meshwright.plan.rules import load
from meshwright.prove.record.reference_run import build_reference
from meshwright.prove.report import render
from meshwright.prove.spec import as_proof, overridden
from meshwright.train.choose_folder import check_continues
from tests.gangs.gang import GangPool
from tests.helpers import alternatives, quick_and_slow
from tests.models.hf.faults import proof_of
from tests.models.hf.runs import hf_config, run
from tests.models.hf.tiny_models import build_tiny, logits_of, random_tokens

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="needs peft"
)  # imported by few workers, late

RANK = "lora.rank=4"


def test_only_adapters_are_trained_and_take_gradients_and_optimizer_state() -> None:
    plan, full = (make_plan(hf_config("qwen3", *words)) for words in ([RANK], []))
    parameters = dict(model_facts(hf_config("qwen3", RANK)).named_parameters())
    assert {name for name, facts in parameters.items() if not facts.frozen} == set(filter(is_adapter, parameters))
    trained = sum(facts.shape[0] * facts.shape[1] for facts in parameters.values() if not facts.frozen)
    memory, whole = predict_memory(plan), predict_memory(full)
    assert (memory.gradients, memory.optimizer) == (4 * trained, 8 * trained)
    assert whole.optimizer == 2 * whole.gradients > 5 * memory.optimizer
    assert memory.parameters == whole.parameters + 4 * trained


def test_targets_are_names_or_globs_and_counted_operations_follow() -> None:
    def trained(*words: str) -> set[str]:
        found = model_facts(hf_config("qwen3", RANK, *words)).named_parameters()
        return {name.rpartition(".lora_")[0] for name, facts in found if not facts.frozen}

    assert trained("lora.targets=q_proj") == {f"model.layers.{n}.self_attn.q_proj" for n in range(4)}
    assert trained("lora.targets=*.3.mlp.*") == {f"model.layers.3.mlp.{n}_proj" for n in ("gate", "up", "down")}
    full, lora = (model_facts(hf_config("qwen3", *words)) for words in ([], [RANK]))
    assert 2 / 3 < lora.flops_per_token / full.flops_per_token < 0.8  # no gradients of frozen matrices


@pytest.mark.slow
def test_adapters_start_as_those_of_peft_and_the_model_as_without_them() -> None:
    config = hf_config("gpt2", RANK)
    f, plain = run_facts(config), run_facts(hf_config("gpt2"))
    first, second = (f"transformer.h.1.mlp.c_fc.lora_{x}.default.weight" for x in "AB")
    assert FAMILY.initial(f, first) == Uniform(64**-0.5)  # kaiming_uniform_(a=sqrt(5)) of [4, 64]
    assert FAMILY.initial(f, second).value == 0
    name = "transformer.h.1.attn.c_proj.weight"  # GPT-2 initialises this matrix by its name
    based = name.replace(".weight", ".base_layer.weight")
    assert FAMILY.initial(f, based) == FAMILY.initial(plain, name) and original_name(based) == name


def test_proofs_start_adapters_elsewhere_than_at_zero() -> None:
    config = hf_config("qwen3", RANK)
    assert not as_proof(config).family_sections()["lora"].zero_init
    assert any("lora.zero_init" in line for line in overridden(config))
    assert not list(overridden(hf_config("qwen3")))


def test_adapters_compute_what_they_do_in_peft() -> None:
    from peft import LoraConfig, get_peft_model

    config = as_proof(hf_config("gpt2", RANK, "lora.rslora=true"))
    ours = build_reference(config)
    theirs = get_peft_model(
        build_tiny("gpt2", torch.float64),
        LoraConfig(
            r=4, lora_alpha=16, use_rslora=True, fan_in_fan_out=True, target_modules=["c_attn", "c_proj", "c_fc"]
        ),
    ).base_model.model.double()
    theirs.load_state_dict(ours.state_dict())
    tokens = random_tokens()
    assert (ours(tokens) - logits_of(theirs, tokens)).abs().max() < 1e-12


@pytest.mark.parametrize(
    "model, words, says",
    [
        ("qwen3", ["lora.rank=4", "lora.targets=query"], "query, which matches no linear layer"),
        ("qwen3", ["lora.rank=4", "lora.targets=lm_head"], "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj"),
        ("qwen3", ["lora.targets=q_proj"], "lora.rank = 0"),
        ("mamba", ["lora.rank=4"], "peft refuses adapters"),
        ("mamba", ["lora.rank=4", "lora.targets=dt_proj"], "doesn't call"),
        ("deepseek_v3", ["lora.rank=4"], "peft takes down_proj, gate_proj, up_proj for parts of the experts"),
    ],
)
def test_what_cannot_be_is_refused(model: str, words: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        hf_config(model, *words)
    assert says in str(error.value)


NAMES = ["lora_r=4", "target_modules=q_proj", "use_rslora=true", "init_lora_weights=false"]


@pytest.mark.parametrize("word", quick_and_slow(zip(NAMES), [("lora_r=4",)]))
def test_names_of_peft_suggest_ours_and_the_suggestion_loads(word: str) -> None:
    with pytest.raises(ConfigError, match="unknown key") as error:
        hf_config("qwen3", word)
    words = shlex.split(error.value.fix.partition(" in place of ")[0])
    assert hf_config("qwen3", *words).family_sections()["lora"].rank > 0
    assert "does not fit" not in error.value.fix


def test_without_peft_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "peft" else find(name, *more))
    with pytest.raises(ConfigError, match="peft is not installed") as error:
        hf_config("qwen3", RANK)
    assert "pip install peft" in error.value.fix


def test_a_family_without_adapters_refuses_them() -> None:
    with pytest.raises(ConfigError, match="applies to hf models"):
        load("llama-tiny", [RANK])


def test_only_adapters_are_merged(tmp_path: Path) -> None:
    weights = find_family("llama").other_weights()
    assert weights is not None
    with pytest.raises(CheckpointError, match="no adapters to merge"):
        weights.export(tmp_path, tmp_path / "out", merge=True)


SAVED = {
    "another alpha": ([RANK], [RANK, "lora.alpha=8"], "lora.alpha is 8.0 here and 16.0"),
    "another rank": ([RANK, "lora.rslora=true"], ["lora.rank=2"], "lora.rank is 2 here and 4"),
    "other targets": ([RANK, 'lora.targets=["q_proj","k_proj"]'], [RANK], "lora.targets is [] here"),
    "adapters": ([RANK], [], "lora is not set here"),
    "no adapters": ([], ["lora.rank=2"], "lora is"),
    "another model": (["model.config=qwen3"], ["model.config=olmo2"], 'model.model_type is "olmo2" here'),
    "both": ([RANK, "model.config=qwen3"], ["lora.rank=2", "model.config=olmo2"], "model.model_type"),
}


@pytest.mark.parametrize("name", quick_and_slow(zip(SAVED), [("other targets",)]))
def test_a_checkpoint_of_another_model_names_keys_that_fit(tmp_path: Path, name: str) -> None:
    before, now, says = SAVED[name]
    config = hf_config("qwen3", *before)
    manifest = Manifest(tmp_path, 1, json.loads(json.dumps(dict(model_facts(config).identity))),
                        {"config": json.loads(json.dumps(config.model_dump()))}, {})  # fmt: skip
    with pytest.raises(CheckpointError) as caught:
        check_continues(manifest, hf_config("qwen3", *now), tmp_path, "")
    assert says in caught.value.what
    [words, *_] = alternatives(caught.value.fix)
    check_continues(manifest, hf_config("qwen3", *now, *words), tmp_path, "")


@pytest.mark.slow
def test_adapters_are_proved_on_shards_of_stages(gang: GangPool) -> None:
    layout = ("mesh.pp=2", "mesh.dp_shard=2", "pipeline.schedule=zb-h1", "recompute.policy=full")
    config = as_proof(hf_config("qwen3", RANK, *layout))
    found = proof_of(gang, config)
    assert found.passed, "\n".join(render(found))


@pytest.mark.slow
def test_a_run_changes_adapters_only_and_its_export_opens_in_peft(gang: GangPool, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    build_tiny("qwen3", torch.float32).save_pretrained(tmp_path / "base")
    words = ("model.weights=folder", RANK, "train.validation_samples=0", "train.sample_tokens=0",
             "train.warmup_steps=0", "checkpoint.every=0")  # fmt: skip
    for layout, resume in ((("mesh.pp=2", "train.steps=2"), None), (("mesh.tp=2", "train.steps=3"), "auto")):
        run(gang, hf_config(str(tmp_path / "base"), *words, *layout), tmp_path / "run", resume=resume)

    checkpoint = newest_valid(tmp_path / "run" / "checkpoints")[0]
    stored = safetensors_file.read_layout(checkpoint)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", local_files_only=True)
    weights = base.state_dict()
    names = [name.removeprefix(PREFIX) for name in stored.tensors if name.startswith(PREFIX)]
    assert {original_name(name) for name in names if not is_adapter(name)} == set(weights)
    for name in names:
        value = read_tensor(stored, f"{PREFIX}{name}")
        assert value.any() if is_adapter(name) else torch.equal(value, weights[original_name(name)]), name
    states = [name for name in stored.tensors if name.startswith("optimizer.exp_avg.")]
    assert {name.removeprefix("optimizer.exp_avg.") for name in states} == set(filter(is_adapter, names))

    format, tokens = TransformersWeights(), random_tokens()
    format.export(checkpoint, tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["base_model_name_or_path"] == str(
        tmp_path / "base"
    )  # fmt: skip
    format.export(checkpoint, tmp_path / "merged", merge=True)
    before = logits_of(base, tokens)
    merged = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", local_files_only=True), tokens)
    adapted = logits_of(PeftModel.from_pretrained(base, tmp_path / "adapter"), tokens)
    assert (adapted - merged).abs().max() < 1e-6 < 1e-3 < (adapted - before).abs().max()
