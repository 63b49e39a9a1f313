"""What a model does with a parameter says whether it decays and whether Muon updates it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from meshwright.config.facts_for_family import model_facts, run_facts
from meshwright.data.loader import IGNORED_TARGET
from meshwright.models.foreign.derive import parameter_roles
from meshwright.models.foreign.probe import probe
from meshwright.models.hf.config import Source
from meshwright.models.hf.origin import TransformersModel
from tests.gangs.gang import GangPool
from tests.helpers import open_data, quick_and_slow
from tests.models.hf.folders import open_folder, write_model
from tests.models.hf.runs import hf_config, run, saved

pytest.importorskip("transformers")

ROLES = {
    "mamba": {"A_log": "vector", "conv1d.weight": "vector", "x_proj.weight": "matrix", "embeddings.weight": "embedding"
    },
    "jamba": {"A_log": "vector", "experts.gate_up_proj": "experts", "router.weight": "matrix"},
    "recurrent_gemma": {"input_gate_weight": "experts", "input_gate_bias": "vector", "conv_1d.weight": "vector"},
    "qwen3_next": {"conv1d.weight": "vector", "A_log": "vector", "in_proj_qkvz.weight": "matrix"},
    "lfm2": {"conv.conv.weight": "vector", "conv.in_proj.weight": "matrix"},
    "gpt2": {"c_attn.weight": "matrix", "wpe.weight": "embedding", "wte.weight": "embedding", "ln_f.weight": "vector"},
    "gpt_oss": {"gate_up_proj": "experts", "gate_up_proj_bias": "vector", "sinks": "vector"},
    "deepseek_v3": {"kv_b_proj.weight": "matrix", "down_proj": "experts", "lm_head.weight": "head"},
    "xlnet": {"r_w_bias": "vector", "rel_attn.q": "matrix"},
}  # fmt: skip
"""Roles by type and by the end of parameters' names."""


@pytest.mark.parametrize("model_type", quick_and_slow(zip(ROLES), [("gpt2",), ("gpt_oss",), ("deepseek_v3",)]))
def test_roles_of_types(model_type: str) -> None:
    origin = TransformersModel(Source(model_type))
    with torch.device("cpu" if model_type == "xlnet" else "meta"):  # whose forward looks at values
        model = origin.build()
    found = probe(model, origin)
    named = parameter_roles(model, origin, found, last=found.after)
    for end, role in ROLES[model_type].items():
        roles = {str(one) for name, one in named.items() if name.endswith(end)}
        assert role in roles and len(roles - {"matrix"}) <= 1, (end, roles)


def test_adapters_are_matrices() -> None:
    pytest.importorskip("peft")
    facts = model_facts(hf_config("qwen3", "lora.rank=4"))
    adapters = {one.role for name, one in facts.named_parameters() if "lora_" in name}
    assert {str(role) for role in adapters} == {"matrix"}


DECAYED = ("in_proj.weight", "x_proj.weight", "dt_proj.weight", "out_proj.weight", "embeddings.weight")
"""Ends of the names of Mamba's parameters that decay."""
LR, DECAY = 0.01, 1.0
EPS = 1e-2
"""Mamba's scan rounds to float32: a smaller epsilon would enlarge what that does to gradients that are near zero."""


def one_step(folder: Path, words: tuple[str, ...]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A plain step of AdamW on the batch that a run's first step reads: parameters before and after."""
    config = hf_config(str(folder), *words)
    task = config.family.task(run_facts(config), open_data(config), torch.device("cpu"))
    batch, model = task.batch(range(8)), open_folder(folder).train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    logits = model(input_ids=batch.inputs, use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED_TARGET).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.max_grad_norm)
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for name, p in named.items() if name.endswith(DECAYED)], "weight_decay": DECAY},
        {"params": [p for name, p in named.items() if not name.endswith(DECAYED)], "weight_decay": 0.0},
    ]
    train = config.train
    torch.optim.AdamW(groups, lr=LR, betas=(train.beta1, train.beta2), eps=train.eps).step()
    return before, {name: p.detach() for name, p in named.items()}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_mamba_is_updated_as_a_plain_loop_does(gang: GangPool, optimizer: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "mamba", tokenizer=False)
    words = (
        "model.weights=folder", "train.precision=float64", "train.steps=1", "train.warmup_steps=0",
        "train.min_lr_ratio=1", f"train.eps={EPS}", f"train.lr={LR}", f"train.weight_decay={DECAY}",
        "train.validation_samples=0", "train.sample_tokens=0", f"train.optimizer={optimizer}",
    )  # fmt: skip
    before, expected = one_step(folder, words)
    run(gang, hf_config(str(folder), *words), tmp_path / "run")
    trained, compared = saved(tmp_path / "run"), 0
    for name, value in expected.items():
        if optimizer == "muon" and name.endswith(DECAYED[:-1]):
            change = (trained[name] - before[name] * (1 - LR * DECAY)) / LR
            size = float(change.square().mean().sqrt())
            assert size == pytest.approx(0.2, rel=0.4), name
            continue
        torch.testing.assert_close(trained[name], value, rtol=0, atol=1e-7)
        compared += 1
    assert compared == (len(expected) if optimizer == "adamw" else len(expected) - 4 * 4)
    decayed = before["backbone.layers.0.mixer.A_log"] * LR * DECAY
    assert float(decayed.abs().max()) > 1e-3, "decay would show"
