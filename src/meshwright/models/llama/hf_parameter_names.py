"""Hugging Face's names for the parameters of our Llama, and the parameters' shapes.

Torch-free. Our rotary embedding pairs elements like Hugging Face's (first half with second half), so weights map by
name alone. Models are given as `LlamaSpec.identity()`, the form stored in checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    """Return Hugging Face's name for each of our parameters, in model order."""
    names = {"embed.weight": _TOP["embed.weight"]}
    for i in range(model["num_layers"]):
        names |= {f"blocks.{i}.{ours}": f"model.layers.{i}.{theirs}" for ours, theirs in _BLOCK.items()}
    names["norm.weight"] = _TOP["norm.weight"]
    if not model["tie_embeddings"]:
        names["head.weight"] = _TOP["head.weight"]
    return names


def parameter_shape(model: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return the shape of our parameter `name`: (out, in) for matrix weights."""
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
