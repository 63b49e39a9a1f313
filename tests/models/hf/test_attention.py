"""Our attention in models of transformers: rules of masks are read off a model's own functions, what takes the place of
a model's attention is shown to compute the same, and what can't is refused with the layer and the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.config.facts_for_family import run_facts
from meshwright.errors import ConfigError, LayoutError
from meshwright.models.contract.model_facts import Part
from meshwright.models.hf import attention
from meshwright.models.hf.attention import OtherMask, rules_of
from meshwright.nn.attention.mask_spec import MaskSpec
from meshwright.prove.catalogue import write_documents
from meshwright.prove.report import render
from meshwright.prove.spec import as_proof
from tests.gangs.gang import GangPool
from tests.helpers import quick_and_slow
from tests.models.hf.faults import proof_of
from tests.models.hf.runs import hf_config, hf_structure

pytest.importorskip("transformers")


def window(size: int) -> Callable[..., torch.Tensor]:
    return lambda batch, head, query, key: (key <= query) & (key > query - size)


def chunk(size: int) -> Callable[..., torch.Tensor]:
    return lambda batch, head, query, key: (key <= query) & (key // size == query // size)


@pytest.mark.parametrize(
    ("visible", "rules"),
    [
        (lambda batch, head, query, key: key <= query, MaskSpec(causal=True)),
        (lambda batch, head, query, key: key.new_ones((), dtype=torch.bool), MaskSpec()),
        (window(5), MaskSpec(causal=True, window=5)),
        (window(64), MaskSpec(causal=True)),  # as long as the sample
        (chunk(64), MaskSpec(causal=True)),
    ],
)
def test_rules_are_read_off_a_function_of_query_and_key(visible: Any, rules: MaskSpec) -> None:
    assert rules_of(visible, 64) == rules


@pytest.mark.parametrize("visible", [chunk(24), lambda batch, head, query, key: (key <= query) & (key != 3)])
def test_other_rules_than_those_of_masks_are_refused(visible: Any) -> None:
    with pytest.raises(OtherMask):
        rules_of(visible, 64)


def test_the_layers_of_a_kind_have_one_mask_and_the_sizes_of_their_heads() -> None:
    structure = hf_structure("gemma3_text")
    found = {block.name: block.attention for block in structure.blocks}
    masks = [found[name].mask.window for name in structure.layers]  # type: ignore[union-attr]
    assert masks == [8, None, 8, None] and not structure.not_ours and not structure.not_context
    one = found[structure.layers[0]]
    assert one is not None and (one.module, one.num_heads, one.num_kv_heads) == ("self_attn", 4, 2)


def test_keys_and_values_count_with_the_wider_of_both() -> None:
    [*_, latent] = hf_structure("deepseek_v3").blocks
    assert latent.attention is not None and latent.attention.head_dim == 24  # 16 + 8 of the rotary part; values: 16


def test_heads_that_tp_does_not_shard_count_on_every_rank() -> None:
    """A plan divides heads by tp; those of a model of which tp shards feed-forwards alone are there on each rank."""
    [block] = hf_structure("gpt2", "mesh.tp=2").blocks
    assert block.attention is not None and block.attention.num_heads == 8


def test_positions_that_count_from_behind_padding_are_found() -> None:
    assert hf_structure("roberta").first_position == 1 and hf_structure("gpt2").first_position == 0


def test_tables_that_a_model_counts_positions_for_get_those_of_the_tokens() -> None:
    structure = hf_structure("bart")
    assert not structure.not_context and not structure.not_packed


@pytest.mark.parametrize(("model", "needs"), [("gpt_oss", (True, False)), ("gemma2", (False, True))])
def test_masks_of_a_stage_are_prepared_for_what_its_layers_ask(model: str, needs: tuple[bool, bool]) -> None:
    config = hf_config(model, "model.attention=meshwright")
    with torch.device("meta"):
        state = attention.attending(config.family.build(run_facts(config), Part(range(4))))
    assert state is not None
    found = [state.core_of(MaskSpec(causal=True, window=window)) for window in (None, 8)]
    requests = [one[1] for one in found if one is not None]
    assert [(one and one.needs_lse, one and one.soft_cap) for one in requests] == [needs] * 2


MIXERS = {
    "lfm2": ("conv", "Lfm2ShortConv"),
    "zaya": ("self_attn.qkv_proj", "ZayaCCAProjection"),  # inside of attention
    "qwen3_next": ("linear_attn", "Qwen3NextGatedDeltaNet"),
    "bamba": ("mamba", "BambaMixer"),
}


@pytest.mark.parametrize(
    ("model", "module"),
    quick_and_slow(MIXERS.items(), [("lfm2", MIXERS["lfm2"]), ("zaya", MIXERS["zaya"])]),
)
def test_modules_that_mix_tokens_run_document_by_document(model: str, module: tuple[str, str]) -> None:
    structure = hf_structure(model)
    assert structure.mixers == (module,) and not structure.not_packed
    with pytest.raises(LayoutError, match=r"mesh.cp = 2: .*layers\.0"):
        hf_config(model, "mesh.cp=2")


@pytest.mark.parametrize(
    ("model", "name"),
    quick_and_slow([("gemma2", "softcap"), ("gpt_oss", "s_aux"), ("granite", "scaling")], [("gemma2", "softcap")]),
)
def test_a_rule_of_scores_that_is_left_out_is_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str, name: str
) -> None:
    right = attention.attend
    monkeypatch.setattr(attention, "attend", lambda *args, **rules: right(*args, **(rules | {name: None})))
    structure = hf_structure(model, f"data.cache_dir={tmp_path}")
    assert structure.not_ours.startswith("the output of model.layers.0 isn't that of its own attention")
    with pytest.raises(LayoutError, match="mesh.cp = 2: the output of model.layers.0"):
        hf_config(model, "mesh.cp=2", f"data.cache_dir={tmp_path}")
    with pytest.raises(ConfigError, match="model.attention = meshwright: the output of model.layers.0") as found:
        hf_config(model, "model.attention=meshwright", f"data.cache_dir={tmp_path}")
    assert found.value.fix == "model.attention=auto"


@pytest.mark.parametrize("model", quick_and_slow([("inkling_text",), ("falcon",), ("deepseek_v32",)], [("falcon",)]))
def test_attention_that_is_not_ours_is_refused_under_cp(model: str) -> None:
    structure = hf_structure(model)
    assert structure.not_ours
    with pytest.raises(LayoutError, match="mesh.cp = 2: ") as found:
        hf_config(model, "mesh.cp=2")
    assert structure.not_context in str(found.value) and found.value.fix


def test_transformers_attention_is_refused_under_cp() -> None:
    with pytest.raises(ConfigError, match=r"mesh.cp = 2 with model.attention = sdpa") as found:
        hf_config("qwen3", "mesh.cp=2", "model.attention=sdpa")
    assert found.value.fix == "model.attention=auto"


QUICK = [("gpt_oss", "mesh.cp=2"), ("qwen3", "mesh.dp_shard=2 PACKED recompute.policy=full")]
PROOFS = quick_and_slow(
    [
        *QUICK,
        ("gemma2", "mesh.cp=2 mesh.pp=2 recompute.policy=full"),
        ("gpt_oss", "mesh.cp=2 mesh.cp_method=heads"),
        ("deepseek_v3", "mesh.cp=2 mesh.cp_method=heads"),
        ("qwen3", "mesh.cp=2 mesh.tp=2 PACKED recompute.policy=selective"),
        ("qwen3_next", "mesh.pp=2 PACKED recompute.policy=full"),
        ("gemma3_text", "mesh.tp=2 PACKED train.compile=true"),
        ("roberta", "mesh.cp=2"),
        ("bart", "mesh.cp=2 PACKED"),
    ],
    QUICK,
)
"""Sinks, caps, latent keys, windows, recurrences and positions that models count, each with another layout."""


@pytest.mark.parametrize(("model", "layout"), PROOFS)
def test_layouts_with_our_attention_are_proved(gang: GangPool, tmp_path: Path, model: str, layout: str) -> None:
    write_documents(documents := tmp_path / "short.jsonl")
    packed = f"data.packing=documents data.source={documents} data.text_field=text"
    result = proof_of(gang, as_proof(hf_config(model, *layout.replace("PACKED", packed).split())))
    assert result.passed, "\n".join(render(result))
