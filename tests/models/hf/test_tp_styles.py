"""Styles of tensor parallelism: transformers' plans as ours, with what they leave out found by shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshwright.errors import LayoutError
from meshwright.models.contract.model_facts import Part
from meshwright.models.contract.tp_styles import (
    COLUMN,
    DIVIDED,
    FINAL_ROW,
    GATHERED_COLUMN,
    HEAD,
    REPLICATED,
    ROW,
    SPLIT_ROW,
    VOCABULARY,
    Style,
    StyleKind,
)
from meshwright.models.foreign.origin import NotSharded
from meshwright.models.foreign.tp_shapes import sharded
from meshwright.models.hf.family import FAMILY
from tests.helpers import alternatives
from tests.models.hf.folders import write_model
from tests.models.hf.runs import hf_config, hf_facts, hf_structure

pytest.importorskip("transformers")


@pytest.fixture
def structure():
    return lambda model: hf_structure(model, "mesh.tp=2")


@pytest.mark.slow
def test_norms_of_sharded_heads_are_divided(structure):
    found = structure("qwen3")
    for block in found.blocks:
        assert block.styles["self_attn.q_norm"] == block.styles["self_attn.k_norm"] == DIVIDED
        assert block.styles["input_layernorm"] == block.styles["post_attention_layernorm"] == REPLICATED
        assert block.styles["self_attn.q_proj"] == block.styles["mlp.up_proj"] == COLUMN
        assert (block.styles["self_attn.o_proj"], block.styles["mlp.down_proj"]) == (ROW, FINAL_ROW)
    assert found.first.styles == {"model.embed_tokens": VOCABULARY}
    assert found.last.styles == {"model.norm": REPLICATED, "lm_head": HEAD}


PLANS = {
    "norms over all heads gather": ("olmo2", {
        "self_attn.q_proj": GATHERED_COLUMN, "self_attn.k_proj": GATHERED_COLUMN, "self_attn.o_proj": SPLIT_ROW,
        "self_attn.q_norm": REPLICATED, "self_attn.k_norm": REPLICATED}),
    "a matrix as wide as the vocabulary is a head only around the layers": ("phi3", {
        "mlp.gate_up_proj": GATHERED_COLUMN}),
    "rotary keys of latent attention have a partial tail": ("deepseek_v2", {
        "self_attn.kv_a_proj_with_mqa": replace(REPLICATED, partial_tail=8), "self_attn.kv_b_proj": COLUMN}),
    "experts are shared out and their router is not": ("mixtral", {
        "mlp.experts": Style(StyleKind.EXPERTS, kept=False, top_k=2), "mlp.gate": REPLICATED}),
    "experts that a rank cannot run alone are replicated": ("llama4_text", {"feed_forward.experts": REPLICATED}),
}  # fmt: skip
"""Styles of modules inside layers, wherever a layer has them."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_plans_of_transformers_are_ours(structure, name):
    model, styles = PLANS[name]
    found = structure(model)
    for path, style in styles.items():
        assert {block.styles[path] for block in found.blocks if path in block.styles} == {style}, path
    if model == "phi3":
        assert found.vocab_size == 256 and found.last.styles["lm_head"] == HEAD


@pytest.mark.slow
def test_layers_without_a_fitting_plan_have_sharded_feed_forwards(structure):
    pairs = {"bert": ("intermediate.dense", "output.dense"), "lfm2": ("feed_forward.w1", "feed_forward.w2")}
    for model, (up, down) in pairs.items():
        found = structure(model)
        assert not found.not_tensor_parallel
        assert found.blocks[0].styles[up] == COLUMN and found.blocks[0].styles[down].kind is StyleKind.ROW


def test_outputs_that_a_model_writes_to_are_copied(structure):
    assert structure("falcon").blocks[0].styles["mlp.dense_h_to_4h"].cloned
    assert not any(style.cloned for style in structure("qwen3").blocks[0].styles.values())


def test_a_model_without_a_plan_shards_its_feed_forward(structure):
    (block,) = structure("gpt2").blocks
    up, down = block.styles["mlp.c_fc"], block.styles["mlp.c_proj"]
    assert dict(up.dims) == {"bias": 0, "weight": 1} and up.summed_input == 64
    assert dict(down.dims) == {"weight": 0} and down.reduced_output == 64
    others = {path: style for path, style in block.styles.items() if path not in ("mlp.c_fc", "mlp.c_proj")}
    assert others and all(style.kind is StyleKind.REPLICATED for style in others.values())


def test_tied_tables_lie_alike(structure):
    found = structure("gpt2")
    assert found.first.styles["transformer.wte"] == found.last.styles["lm_head"] == REPLICATED


@pytest.mark.slow
def test_a_plan_that_does_not_fit_is_refused_with_the_reason():
    with pytest.raises(LayoutError, match="a forward with shards of the matrices fails") as caught:
        hf_config("bitnet", "mesh.tp=2")
    assert "mesh.tp=1" in caught.value.fix
    hf_config("bitnet", "mesh.dp_shard=2")


@pytest.mark.slow
def test_sizes_of_tp_that_divide_no_matrix_are_refused_with_one_that_does(tmp_path):
    """Keys and values of one head, and a feed-forward of 130."""
    fields = {"num_key_value_heads": 1, "intermediate_size": 130}
    write_model(tmp_path, tokenizer=False, weights=False, **fields)
    with pytest.raises(LayoutError, match="mesh.tp = 4: .*130 along dim . is not divisible by 4") as caught:
        hf_config(str(tmp_path), "mesh.tp=4")
    assert alternatives(caught.value.fix) == [["mesh.tp=2"], ["mesh.tp=1"]]
    for words in alternatives(caught.value.fix):
        hf_config(str(tmp_path), *words)


def test_a_model_that_is_not_sharded_keeps_its_parameters():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 6))
    before = dict(model.named_parameters())
    with pytest.raises(NotSharded, match="1.weight: 6 along dim 0"), sharded(model, {"0": COLUMN, "1": COLUMN}, 4):
        pass
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_one_rank_needs_no_styles():
    found = hf_structure("qwen3")
    assert not any(block.styles for block in found.blocks) and not found.not_tensor_parallel


@pytest.mark.parametrize(("tp", "is_eager"), [(1, False), (2, True)])
def test_experts_under_tp_are_not_grouped(tp, is_eager):
    """Grouped products leave the rows of tokens for other ranks' experts as they find them: NaN, sometimes."""
    f = hf_facts("mixtral", f"mesh.tp={tp}", "train.precision=bfloat16")
    with torch.device("meta"):
        model = FAMILY.build(f, Part(range(4)))
    assert (model.get_experts_implementation()[""] == "eager") is is_eager
