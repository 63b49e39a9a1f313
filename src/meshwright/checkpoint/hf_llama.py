"""Hugging Face's Llama: its names for our parameters, their shapes, and its `config.json`.

Torch-free. Our rotary embedding pairs elements as Hugging Face's does (first half with second half), so
weights map by name alone. A model is described by what `LlamaSpec.identity()` gives, the form in which
checkpoints know it.

`config.json` is written for readers of both generations: transformers 4 reads `rope_theta`, `rope_scaling`
and `torch_dtype`; transformers 5 puts the first two together as `rope_parameters` and says `dtype`, and
still accepts the old keys. Checked against transformers 4.45 and 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.errors import CheckpointError

ARCHITECTURE = "LlamaForCausalLM"

_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn.gate.weight": "mlp.gate_proj.weight",
    "ffn.up.weight": "mlp.up_proj.weight",
    "ffn.down.weight": "mlp.down_proj.weight",
}


def hf_names(model: Mapping[str, Any]) -> dict[str, str]:
    """Hugging Face's name for each of our parameters, in the order of the model."""
    names = {"embed.weight": _TOP["embed.weight"]}
    for i in range(model["num_layers"]):
        names |= {f"blocks.{i}.{ours}": f"model.layers.{i}.{theirs}" for ours, theirs in _BLOCK.items()}
    names["norm.weight"] = _TOP["norm.weight"]
    if not model["tie_embeddings"]:
        names["head.weight"] = _TOP["head.weight"]
    return names


def parameter_shape(model: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """The shape of our parameter `name`: (out, in) for weights of matrix products."""
    dim, ffn_dim = model["dim"], model["ffn_dim"]
    q_dim, kv_dim = model["num_heads"] * model["head_dim"], model["num_kv_heads"] * model["head_dim"]
    shapes = {
        "embed.weight": (model["vocab_size"], dim),
        "norm.weight": (dim,),
        "head.weight": (model["vocab_size"], dim),
        "attention_norm.weight": (dim,),
        "attention.wq.weight": (q_dim, dim),
        "attention.wk.weight": (kv_dim, dim),
        "attention.wv.weight": (kv_dim, dim),
        "attention.wo.weight": (dim, q_dim),
        "ffn_norm.weight": (dim,),
        "ffn.gate.weight": (ffn_dim, dim),
        "ffn.up.weight": (ffn_dim, dim),
        "ffn.down.weight": (dim, ffn_dim),
    }
    return shapes[name.split(".", 2)[2] if name.startswith("blocks.") else name]


def config_from_model(model: Mapping[str, Any], *, dtype: str, max_seq_len: int | None) -> dict[str, Any]:
    """The `config.json` of a model.

    Args:
        model: our description.
        dtype: of the weights, as torch calls it (`bfloat16`).
        max_seq_len: tokens the model can take; when None, what the rotary scaling stretches to, or 2048.
    """
    scaling = model["rope_scaling"]
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        rope = {
            "rope_type": "llama3",
            "factor": scaling["factor"],
            "low_freq_factor": scaling["low_freq_factor"],
            "high_freq_factor": scaling["high_freq_factor"],
            "original_max_position_embeddings": scaling["original_seq_len"],
        }
    if max_seq_len is None:
        max_seq_len = 2048 if scaling is None else int(scaling["original_seq_len"] * scaling["factor"])
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": model["num_layers"],
        "hidden_size": model["dim"],
        "num_attention_heads": model["num_heads"],
        "num_key_value_heads": model["num_kv_heads"],
        "head_dim": model["head_dim"],
        "intermediate_size": model["ffn_dim"],
        "vocab_size": model["vocab_size"],
        "max_position_embeddings": max_seq_len,
        "rope_theta": model["rope_theta"],
        "rope_scaling": None if scaling is None else rope,
        "rope_parameters": {**rope, "rope_theta": model["rope_theta"]},
        "rms_norm_eps": model["norm_eps"],
        "tie_word_embeddings": model["tie_embeddings"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        # The defaults are tokens 1 and 2 of Llama 2's vocabulary; whoever has the tokenizer knows better.
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
        "dtype": dtype,
    }


def model_from_config(config: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Our description of the model that a `config.json` describes.

    Args:
        config: its content.
        where: its path, for errors.

    Raises:
        CheckpointError: not a Llama, one with parts that ours lacks, or a key is missing.
    """
    _check_architecture(config, where)
    try:
        dim, num_heads = config["hidden_size"], config["num_attention_heads"]
        return {
            "kind": "llama",
            "num_layers": config["num_hidden_layers"],
            "dim": dim,
            "num_heads": num_heads,
            "num_kv_heads": config.get("num_key_value_heads") or num_heads,
            "ffn_dim": config["intermediate_size"],
            "vocab_size": config["vocab_size"],
            "head_dim": config.get("head_dim") or dim // num_heads,
            **_rope_from_config(config, where),
            "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
            "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        }
    except KeyError as error:
        raise CheckpointError(
            f"config.json has no {error.args[0]}",
            where=where,
            rule="a Llama's config.json gives its dimensions",
            fix="take the config.json that belongs to these weights",
        ) from None


def _check_architecture(config: Mapping[str, Any], where: str) -> None:
    architectures = config.get("architectures") or [ARCHITECTURE]
    kind = config.get("model_type")
    if kind != "llama" or ARCHITECTURE not in architectures:
        raise CheckpointError(
            f"not a Llama: model_type {kind}, architectures {', '.join(architectures)}",
            where=where,
            rule=f"weights are imported from a {ARCHITECTURE} of model_type llama",
            fix="give the directory of a Llama in Hugging Face's format",
        )
    allowed: dict[str, tuple[Any, ...]] = {
        "hidden_act": (None, "silu", "swish"),
        "attention_bias": (None, False),
        "mlp_bias": (None, False),
        "partial_rotary_factor": (None, 1, 1.0),
        "quantization_config": (None,),
    }
    for key, values in allowed.items():
        if config.get(key) not in values:
            raise _unsupported(key, config[key], values, where)


def _rope_from_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    # transformers 5 gives the older key precedence as well.
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise _unsupported("rope_type", kind, ("default", "llama3"), where)
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise _unsupported("partial_rotary_factor", rope["partial_rotary_factor"], (1.0,), where)
    if kind == "default":
        return {"rope_theta": float(theta), "rope_scaling": None}
    original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
    scaling = {
        "factor": float(rope["factor"]),
        "low_freq_factor": float(rope["low_freq_factor"]),
        "high_freq_factor": float(rope["high_freq_factor"]),
        "original_seq_len": int(original),
    }
    return {"rope_theta": float(theta), "rope_scaling": scaling}


def _unsupported(key: str, value: Any, allowed: tuple[Any, ...], where: str) -> CheckpointError:
    return CheckpointError(
        f"{key} = {value!r} is something our Llama doesn't have",
        where=where,
        rule=f"{key} is {' or '.join(repr(choice) for choice in allowed if choice is not None) or 'not set'}",
        fix="import another model",
    )
