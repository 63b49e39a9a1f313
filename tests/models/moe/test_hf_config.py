"""`config.json` of a Mixtral: values are read correctly or rejected by key, and only a Mixtral is written."""

from __future__ import annotations

import subprocess
import sys

import pytest

from meshwright.errors import CheckpointError
from meshwright.models.moe.hf_mixtral import ROUTING, check_is_mixtral, config_from_model, model_from_config
from tests.helpers import clean_environment

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
        ({"rope_theta": LEFT_OUT, "rope_parameters": LEFT_OUT}, {}),
        ({"rope_theta": 5.0, "rope_parameters": LEFT_OUT}, {"rope_theta": 5.0}),
        ({"rope_theta": LEFT_OUT, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope_theta": 7.0}),
        ({"num_local_experts": LEFT_OUT}, {"num_experts": 8}),
        ({"num_experts_per_tok": LEFT_OUT}, {}),
        ({"rms_norm_eps": LEFT_OUT}, {}),
        ({"num_key_value_heads": None}, {"num_kv_heads": 4}),
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
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type = 'yarn'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
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


def test_reading_them_needs_no_torch():
    code = "import sys\nfrom meshwright.models.moe import hf_mixtral\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=clean_environment(PYTHONDONTWRITEBYTECODE="1"))
