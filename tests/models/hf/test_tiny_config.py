"""Tiny configurations: every causal model type is small, has all its kinds of layers, trains, and sees no future."""

from __future__ import annotations

import math

import pytest
import torch

from meshwright.errors import ConfigError
from meshwright.models.hf import private, tiny_config
from meshwright.models.hf.tiny_config import BY_HAND, FLOAT32_ONLY
from tests.models.hf.tiny_models import build_tiny, future_leak, random_tokens, step

transformers = pytest.importorskip("transformers")

KINDS = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types", "attention_layers", "no_rope_layers")
EXAMPLES = {
    "qwen3": {"layer_types": {"sliding_attention", "full_attention"}},
    "gpt2": {},
    "glm4_moe_lite": {"mlp_layer_types": {"dense", "sparse"}},
    "nemotron_h": {"layers_block_type": {"linear_attention", "full_attention", "moe", "mlp"}},
    "zamba2": {"layers_block_type": {"linear_attention", "hybrid"}},
    "lfm2_moe": {"layer_types": {"conv", "full_attention"}},
}
MAX_PARAMETERS = 3_000_000

UNTRAINED = {
    # Indexers choose tokens, and routers' biases balance experts, without a gradient.
    "indexer", "expert_bias", "e_score_correction_bias", "patcher",
    # Parts for an encoder, images, sound or a task that a text alone does not reach.
    "encoder_attn", "encoder_attn_layer_norm", "cross_attn", "pooler", "image_encoder", "visual_projection",
    "embed_tokens_extend", "mask_emb", "seg_embed", "r_s_bias",
    # Tables and states that are parameters in name.
    "embed_positions", "z_L_init",
}  # fmt: skip
"""Parts of names of parameters that may get no gradient."""

UNTRAINED_OF = {"reformer": ["lm_head.bias"]}
"""Names in single types: Reformer's bias has another, tied name, and this one is not read."""


def kinds_of(config):
    values = {name: getattr(config, name, None) for name in KINDS}
    return {name: set(value) for name, value in values.items() if isinstance(value, list)}


def check(model_type):
    dtype = torch.float32 if model_type in FLOAT32_ONLY else torch.float64
    model = build_tiny(model_type, dtype)
    parameters = dict(model.named_parameters())
    assert sum(parameter.numel() for parameter in parameters.values()) < MAX_PARAMETERS
    tokens = random_tokens()
    loss = step(model, tokens)
    assert math.isfinite(loss) and abs(loss - math.log(256)) < 1.5
    left = [name for name, parameter in parameters.items() if parameter.grad is None]
    assert [name for name in left if not UNTRAINED.intersection(name.split("."))] == UNTRAINED_OF.get(model_type, [])
    assert all(parameter.grad.isfinite().all() for parameter in parameters.values() if parameter.grad is not None)
    # Some mask or normalise in float32, whatever the model's dtype.
    assert future_leak(model, tokens) < (1e-4 if dtype == torch.float32 else 1e-7)


@pytest.mark.parametrize("model_type", EXAMPLES)
def test_a_tiny_model_is_small_and_trains_with_every_kind_of_layer(model_type):
    config = tiny_config.tiny_config(model_type)
    assert config.num_hidden_layers == 4 and config.hidden_size == 64 and config.vocab_size == 256
    kinds = kinds_of(config)
    for name, expected in EXAMPLES[model_type].items():
        assert kinds[name] == expected
    check(model_type)


def test_sizes_that_layouts_split():
    config = tiny_config.tiny_config("qwen3_moe")
    assert (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size) == (4, 2, 128)
    assert (config.num_experts, config.num_experts_per_tok, config.mlp_only_layers) == (4, 2, [0])
    assert config.pad_token_id is None and config.attention_dropout == 0.0 and not config.use_cache


def test_a_type_behind_images_is_its_text_model():
    assert tiny_config.text_type("gemma3") == "gemma3_text"
    assert tiny_config.tiny_fields("gemma3") == tiny_config.tiny_fields("gemma3_text")
    names = tiny_config.causal_types()
    assert "gemma3" not in names and "gemma3_text" in names and len(set(names)) == len(names)


def test_a_configuration_is_the_callers_own():
    tiny_config.tiny_fields("lfm2")["layer_types"].append("conv")
    assert tiny_config.tiny_fields("lfm2")["layer_types"] == ["conv", "full_attention"] * 2


def test_an_unknown_type_and_an_unsupported_one_are_refused():
    with pytest.raises(ConfigError, match="'qwen_3'") as caught:
        tiny_config.tiny_config("qwen_3")
    assert "qwen3" in caught.value.fix
    with pytest.raises(ConfigError, match="attends both ways"):
        tiny_config.tiny_config("cpmant")


def test_tables_name_types_that_exist():
    names = set(tiny_config.causal_types())
    assert set(BY_HAND) <= names and set(FLOAT32_ONLY) <= names and set(tiny_config.UNSUPPORTED) <= names
    assert not set(BY_HAND) & set(tiny_config.UNSUPPORTED)


def check_as_it_is(model_type):
    """A forward with tokens alone of the default configuration, without the memory that it would take."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(private.config_class(model_type)())
        model(input_ids=random_tokens().to("meta"))


PLAIN = [one for one in private.causal_names() if tiny_config.text_type(one) == one
         and one not in {*BY_HAND, *tiny_config.UNSUPPORTED, *EXAMPLES}]  # fmt: skip
"""Types that are shrunk by rules alone. Those of a row are alike, so every sixth trains here; proofs of all are a
command of their own, whose outcomes docs/catalogue.md shows."""


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted({*BY_HAND, *tiny_config.UNSUPPORTED, *PLAIN[::6]} - {*EXAMPLES}))
def test_a_type_trains_or_is_listed_with_the_reason(model_type, monkeypatch):
    if model_type in tiny_config.UNSUPPORTED:
        monkeypatch.setattr(tiny_config, "UNSUPPORTED", {})
        with pytest.raises(Exception):  # noqa: B017 - the reasons differ
            (check_as_it_is if "assistant" in model_type else check)(model_type)
    else:
        check(model_type)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(FLOAT32_ONLY))
def test_types_for_float32_fail_in_float64(model_type):
    with pytest.raises(RuntimeError):
        step(build_tiny(model_type, torch.float64), random_tokens())


@pytest.mark.slow
def test_no_kind_of_layer_of_a_default_is_lost():
    for model_type in tiny_config.causal_types():
        if model_type not in tiny_config.UNSUPPORTED:
            default = kinds_of(private.text_config_class(private.config_class(model_type))())
            tiny = kinds_of(tiny_config.tiny_config(model_type).get_text_config())
            for name, kinds in default.items():
                assert kinds <= tiny[name], (model_type, name)
