"""A model's structure is the model's: its parameters, its stages, its initial values; it is derived once, and refused
if its own forward adds a loss.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.config.facts_for_family import model_facts, run_facts
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.models.contract.build_module import build_part
from meshwright.models.contract.model_facts import Part
from meshwright.models.contract.task import SimpleBatch
from meshwright.models.foreign.packing import Float64Mode
from meshwright.models.foreign.probe import probe
from meshwright.models.foreign.structure import cached_structure
from meshwright.models.hf import private
from meshwright.models.hf.config import Source
from meshwright.models.hf.origin import TransformersModel
from meshwright.models.hf.tiny_config import causal_types, tiny_config
from meshwright.nn.linear import undeferred_parameters
from meshwright.pipeline.actions import ActionKind
from meshwright.plan.make_plan import make_plan
from meshwright.prove.record.reference_run import build_reference, fill_tensors
from meshwright.prove.spec import as_proof
from tests.helpers import clean_environment, quick_and_slow
from tests.models.hf.folders import change_config, write_model
from tests.models.hf.runs import hf_config, hf_structure
from tests.models.hf.tiny_models import build_tiny, logits_of, random_tokens

pytest.importorskip("transformers")


TYPES = ("qwen3", "gpt2", "mixtral", "deepseek_v3", "gemma4_text")


@cache
def theirs(model_type):
    """Transformers' own model, with its own initial values."""
    return build_tiny(model_type, torch.float64)


@pytest.mark.parametrize("model_type", quick_and_slow(zip(TYPES), [("gpt2",), ("mixtral",)]))
def test_parameters_are_those_of_the_module(model_type):
    config = hf_config(model_type)
    aliases = hf_structure(model_type).aliases
    real = {name: tuple(p.shape) for name, p in theirs(model_type).named_parameters(remove_duplicate=False)}
    found = {name: facts.shape for name, facts in model_facts(config).named_parameters()}
    ties = {facts.name for facts in hf_structure(model_type).last.parameters if facts.tied_to}
    assert found | {name: real[name] for name in ties} == {n: s for n, s in real.items() if n not in aliases}


@pytest.mark.slow
def test_what_is_particular_to_each():
    tied = {p.name: p.tied_to for p in hf_structure("gpt2").last.parameters}
    assert tied["lm_head.weight"] == "transformer.wte.weight" and tied["transformer.ln_f.weight"] is None
    assert hf_structure("gpt2").max_len == 128 and hf_structure("qwen3").max_len is None
    deep = hf_structure("deepseek_v3")
    assert len(deep.blocks) == 2 and deep.layers == (deep.blocks[0].name, *[deep.blocks[1].name] * 3)
    assert len(hf_structure("mixtral").blocks) == 1
    assert hf_structure("gemma4_text").every.parameters
    assert not hf_structure("qwen3").every.parameters


@pytest.mark.parametrize("model_type", TYPES)
def test_two_stages_compute_the_logits_of_transformers(model_type):
    config = as_proof(hf_config(model_type, "mesh.pp=2"))
    f, family = run_facts(config), config.family
    weights = dict(build_reference(config).named_parameters(remove_duplicate=False))
    tokens, stream = random_tokens(), None
    undeferred: list[str] = []
    for stage in range(2):
        module = build_part(family, f, dtype=torch.float64, part=Part(range(2 * stage, 2 * stage + 2), stage, 2))
        module.to_empty(device="cpu")
        undeferred += undeferred_parameters(module)
        names = dict(module.named_parameters())
        module.load_state_dict({name: weights[name].detach() for name in names}, strict=False)
        fill_tensors(module.named_buffers(), family, f)
        others = range(2, 4) if stage == 0 else range(2)
        path = hf_structure(model_type).layers_path
        assert not any(name.startswith(f"{path}.{layer}.") for name in names for layer in others)
        stream = family.run(module, tokens if stream is None else stream, SimpleBatch(tokens, ()))
    assert next(iter(undeferred), "") == hf_structure(model_type).undeferred
    whole = build_tiny(model_type, torch.float64)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameter.copy_(weights[name])
    with Float64Mode():
        expected = logits_of(whole, tokens)
    torch.testing.assert_close(stream, expected, rtol=1e-12, atol=1e-12)


def test_a_tied_parameter_of_every_stage_is_summed_once() -> None:
    """The table has a sum for each set of stages that share parameters, and none for the ends that tie one of them."""
    plan = make_plan(hf_config("gemma4_text", "mesh.pp=4"))
    assert [parameter.stages() for parameter in plan.shared_parameters()] == [(0, 1, 2, 3)] * 4
    for row in plan.schedule.actions:
        assert sum(action.kind is ActionKind.SYNC_SHARED for action in row) == 1


@pytest.mark.parametrize("model_type", TYPES)
def test_initial_values_are_distributed_as_theirs(model_type):
    config, compared = hf_config(model_type), 0
    drawn = dict(build_reference(as_proof(config)).named_parameters())
    for name, real in theirs(model_type).named_parameters():
        if real.numel() < 1000:
            continue
        std, noise = real.std().item(), 6 / real.numel() ** 0.5
        assert drawn[name].std().item() == pytest.approx(std, rel=noise), name
        assert drawn[name].mean().item() == pytest.approx(real.mean().item(), abs=noise * std), name
        compared += 1
    assert compared > 10


def test_an_encoder_is_refused(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": 256, **sizes}))
    with pytest.raises(ConfigError, match="is an encoder"):
        hf_config(str(tmp_path))


def test_a_model_without_a_list_of_layers_is_refused():
    with pytest.raises(ConfigError, match="Sequential has no list of layers"):
        TransformersModel(Source("qwen3")).largest_list(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2)


@pytest.mark.slow
def test_learned_positions_bound_the_length():
    with pytest.raises(MeshwrightError, match="128 positions"):
        hf_config("gpt2", "train.seq_len=256")


def fail():
    raise AssertionError("derived again")


def test_a_structure_is_derived_once(tmp_path):
    structure, key = hf_structure("gpt2"), {"model_type": "gpt2"}
    assert cached_structure(key, lambda: structure, cache_dir=str(tmp_path)) == structure
    assert cached_structure(key, fail, cache_dir=str(tmp_path)) == structure
    with pytest.raises(AssertionError, match="derived again"):
        cached_structure({**key, "tp": 2}, fail, cache_dir=str(tmp_path))


@pytest.mark.parametrize("damage", [b"", b"{", b'{"class_name": 3}'])
def test_a_damaged_file_is_derived_again(tmp_path, damage):
    structure, key = hf_structure("gpt2"), {"model_type": "gpt2"}
    cached_structure(key, lambda: structure, cache_dir=str(tmp_path))
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage)
    assert cached_structure(key, lambda: structure, cache_dir=str(tmp_path)) == structure
    assert cached_structure(key, fail, cache_dir=str(tmp_path)) == structure


PLAN = """
import sys
from meshwright.plan.rules import load
from meshwright.plan.make_plan import make_plan
make_plan(load("hf-tiny", sys.argv[1:]))
print(*sorted({"torch", "transformers"} & set(sys.modules)))
"""


def test_a_plan_from_the_cache_needs_no_torch():
    hf_structure("gpt2", "mesh.pp=2")
    words = ("model.config=gpt2", "mesh.pp=2", "train.seq_len=32", "train.num_microbatches=2")
    command = [sys.executable, "-c", PLAN, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def with_losses(model_type: str, *, wanted: bool, weight: float) -> Any:
    """A tiny configuration whose losses have a weight, and are added or not."""
    with private.quiet():
        config = tiny_config(model_type)
    text = config.get_text_config()
    for part in (text, getattr(text, "ffn_config", None)):
        for name in vars(part) if part is not None else ():
            if "loss" in name and isinstance(getattr(part, name), float):
                setattr(part, name, weight)
    if hasattr(text, "output_router_logits"):
        text.output_router_logits = wanted
    return config


def added(config: Any) -> float:
    """What transformers' model adds to the cross-entropy of its logits."""
    torch.manual_seed(0)
    model = private.causal_lm(config, attention="auto", experts="eager").eval()
    ids = torch.randint(0, 200, (2, 24))
    with torch.no_grad():
        out = model(input_ids=ids, labels=ids, use_cache=False)
    return float(out.loss - F.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()))


ADDING = [name for name in causal_types() if "moe" in name or name in ("mixtral", "jamba", "jetmoe", "dbrx", "bamba")]
REFUSED = ("bamba", "dbrx")
"""Types that add another loss than that of their routers, or whose routers are not told."""
WITH_LOSSES = sorted({"mixtral", "jetmoe", "bamba", "dbrx", "glm4_moe", *ADDING[::9]})


@pytest.mark.parametrize("model_type", quick_and_slow(zip(WITH_LOSSES), [("mixtral",)]))
def test_a_loss_is_trained_or_refused_if_transformers_adds_one(model_type: str) -> None:
    for wanted, weight in ((False, 5.0), (True, 0.0), (True, 5.0)):
        config = with_losses(model_type, wanted=wanted, weight=weight)
        origin = TransformersModel(Source(config.model_type, fields=config.to_json_string(use_diff=False)))
        with torch.device("cpu" if model_type in ("dbrx", "jetmoe") else "meta"):  # whose experts depend on values
            model = origin.build()
        found: Any = None
        try:
            found = origin.router_loss(model, probe(model, origin).time)
        except ConfigError as error:
            found = error.what
        is_added = abs(added(config)) > 1e-4
        is_refused = is_added and model_type in REFUSED
        assert (found is not None) is is_added, (wanted, weight, found)
        assert (isinstance(found, str) and "adds a loss with" in found) is is_refused, (wanted, weight, found)


@pytest.mark.slow
def test_the_fix_works(tmp_path: Path) -> None:
    made = {"model_type": "dbrx", "weights": False, "tokenizer": False}
    folder = write_model(tmp_path / "moe", output_router_logits=True, **made)
    with pytest.raises(ConfigError, match="adds a loss with moe_loss_weight = 0.01") as found:
        hf_config(str(folder))
    assert found.value.fix == f'"output_router_logits": false in {folder}/config.json'
    changed = write_model(tmp_path / "off", **made)
    change_config(changed, output_router_logits=False)
    hf_config(str(changed))
