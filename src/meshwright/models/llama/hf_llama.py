"""Hugging Face's Llama, for import and export: `config.json`, and names of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from meshwright.models.decoder.description import DecoderSpec
from meshwright.models.hf_format.architecture import (
    SUPPORTED_VALUES,
    Architecture,
    DecoderFields,
    MappedTensor,
    Model,
    Rope,
    RopeFields,
    check_architecture,
    context_len,
    decoder_config,
    decoder_dimensions,
    decoder_tensors,
    read_rope,
)
from meshwright.models.hf_format.checks import Count, Positive, parse_fields, unsupported

ARCHITECTURE = "LlamaForCausalLM"
MODEL_TYPE = "llama"
SCALING = "llama3"
"""`rope_type` of Llama 3.1."""

DEFAULT_THETA = 10000.0


class Llama3RopeFields(RopeFields):
    """Fields of Llama 3.1's RoPE scaling."""

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Count | None = None


class LlamaFields(DecoderFields):
    """Dimensions of a Llama model, with transformers' defaults."""

    rms_norm_eps: Positive = 1e-6


def model_from_config(config: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Convert a `config.json` to our model description (see `ConfigReader`)."""
    check_architecture(
        config,
        name=ARCHITECTURE,
        model_type=MODEL_TYPE,
        noun="Llama",
        supported={**SUPPORTED_VALUES, "mlp_bias": (None, False)},
        where=where,
    )
    llama = parse_fields(LlamaFields, config, where=where)
    found = decoder_dimensions(llama, where=where)
    rope = read_rope(llama, kinds=("default", SCALING), default_theta=DEFAULT_THETA, where=where)
    found |= {"ffn_dim": llama.intermediate_size, "rope_theta": rope.theta, "rope_scaling": None}
    if rope.kind == SCALING:
        found["rope_scaling"] = _scaling(rope, llama, where)
    return {"kind": "llama", **{field.name: found[field.name] for field in fields(DecoderSpec) if field.name in found}}


def config_from_model(model: Mapping[str, Any], *, dtype: str, max_seq_len: int | None) -> dict[str, Any]:
    """Convert our model description to a `config.json`; the default context length is that after rotary scaling, or
    2048."""
    scaling, rope = model["rope_scaling"], None
    if scaling is not None:
        rope = {
            "rope_type": SCALING,
            "factor": scaling["factor"],
            "low_freq_factor": scaling["low_freq_factor"],
            "high_freq_factor": scaling["high_freq_factor"],
            "original_max_position_embeddings": scaling["original_seq_len"],
        }
        max_seq_len = max_seq_len or int(scaling["original_seq_len"] * scaling["factor"])
    config = decoder_config(
        model,
        name=ARCHITECTURE,
        model_type=MODEL_TYPE,
        intermediate_size=model["ffn_dim"],
        dtype=dtype,
        max_seq_len=max_seq_len,
        rope_scaling=rope,
    )
    return config | {"attention_bias": False, "mlp_bias": False}


def _scaling(rope: Rope, llama: LlamaFields, where: str) -> dict[str, Any]:
    scaled = parse_fields(Llama3RopeFields, rope.content, where=where, inside=rope.key)
    if scaled.low_freq_factor >= scaled.high_freq_factor:
        rule = f"high_freq_factor must exceed low_freq_factor = {scaled.low_freq_factor}"
        raise unsupported(f"{rope.key}.high_freq_factor", scaled.high_freq_factor, where, rule, contradicts=True)
    return {
        "factor": scaled.factor,
        "low_freq_factor": scaled.low_freq_factor,
        "high_freq_factor": scaled.high_freq_factor,
        "original_seq_len": scaled.original_max_position_embeddings or context_len(llama, where=where),
    }


def mapped_tensors(model: Model) -> Iterator[MappedTensor]:
    return decoder_tensors(model, _feed_forward)


def _feed_forward(model: Model) -> Iterator[MappedTensor]:
    dim, ffn_dim = model["dim"], model["ffn_dim"]
    yield MappedTensor("ffn.gate.weight", (ffn_dim, dim), ("mlp.gate_proj.weight",))
    yield MappedTensor("ffn.up.weight", (ffn_dim, dim), ("mlp.up_proj.weight",))
    yield MappedTensor("ffn.down.weight", (dim, ffn_dim), ("mlp.down_proj.weight",))


LLAMA = Architecture(
    kind="llama",
    noun="Llama",
    name=ARCHITECTURE,
    model_type=MODEL_TYPE,
    read_config=model_from_config,
    write_config=config_from_model,
    tensors=mapped_tensors,
)
