"""Keys of `config.json` that all decoders have: dimensions and rotary embedding, in both directions.

Written files suit both generations: transformers 4 reads `rope_theta`, `rope_scaling` and `torch_dtype`;
transformers 5 merges the first two into `rope_parameters`, renames the third to `dtype`, and still accepts the old
keys. Checked against transformers 4.45 and 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import CheckpointError
from meshwright.models.huggingface.architecture import Model
from meshwright.models.huggingface.checks import train_command
from meshwright.models.huggingface.json_fields import (
    Count,
    JsonFields,
    Positive,
    allowed_values,
    missing_key,
    parse_fields,
    unsupported,
)

SUPPORTED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu", "swish"),
    "attention_bias": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
}
"""Supported values of options that none of our decoders implements."""

DEFAULT_MAX_SEQ_LEN = 2048


class RopeFields(JsonFields):
    """Fields of `rope_parameters`, formerly `rope_scaling`."""

    rope_type: str | None = None
    type: str | None = None
    """Former name of `rope_type`."""
    rope_theta: Positive | None = None
    partial_rotary_factor: float | None = None

    def kind(self) -> str:
        """Return the type of frequency scaling."""
        return self.rope_type or self.type or "default"


class ArchitectureFields(JsonFields):
    """Fields that identify the architecture."""

    model_type: str
    architectures: list[str] | None = None


class DecoderFields(JsonFields):
    """Dimensions of a decoder. Null is accepted for an omitted key wherever transformers accepts it."""

    num_hidden_layers: Count
    hidden_size: Count
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    intermediate_size: Count
    vocab_size: Count
    max_position_embeddings: Count | None = None
    rms_norm_eps: Positive
    rope_theta: Positive | None = None
    tie_word_embeddings: bool | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None


@dataclass(frozen=True)
class Rope:
    """Rotary embedding in a `config.json`."""

    kind: str
    """Type of frequency scaling; `default` for none."""
    theta: float
    key: str
    """Key of the object that describes it."""
    content: Mapping[str, Any]
    """That object."""


def check_architecture(
    config: Mapping[str, Any],
    *,
    name: str,
    model_type: str,
    noun: str,
    supported: Mapping[str, tuple[Any, ...]],
    where: str,
) -> None:
    """Check the architecture in a `config.json`, and options that we do not implement.

    Args:
        config: content of the file.
        name: the expected class in `transformers`.
        model_type: the expected `model_type`.
        noun: the architecture in messages, after "a".
        supported: supported values of options; None means that the key may be left out.
        where: path of the file, for errors.

    Raises:
        CheckpointError: the architecture is another one, or an option has another value.
    """
    fields = parse_fields(ArchitectureFields, config, where=where)
    architectures = fields.architectures or [name]
    if fields.model_type != model_type or name not in architectures:
        raise CheckpointError(
            f"not a {noun}: model_type {fields.model_type}, architectures {', '.join(architectures)}",
            where=where,
            rule=f"weights are imported from a {name} of model_type {model_type}",
            fix=train_command(Path(where).parent),
        )
    for key, values in supported.items():
        if config.get(key) not in values:
            raise unsupported(key, config[key], where, allowed_values(key, values))


def decoder_dimensions(fields: DecoderFields, *, where: str) -> dict[str, Any]:
    """Return the dimensions that all decoders have, with our names, except those of the feed-forward layers.

    Raises:
        CheckpointError: the dimensions contradict each other, or rotary embedding does not support them.
    """
    num_heads, num_kv_heads = fields.num_attention_heads, fields.num_key_value_heads or fields.num_attention_heads
    if num_heads % num_kv_heads:
        rule = f"must divide num_attention_heads = {num_heads}"
        raise unsupported("num_key_value_heads", num_kv_heads, where, rule, contradicts=True)
    head_dim = fields.head_dim or fields.hidden_size // num_heads
    if head_dim < 2 or head_dim % 2:
        raise unsupported("head_dim", head_dim, where, "rotary embedding needs an even, positive head_dim")
    return {
        "num_layers": fields.num_hidden_layers,
        "dim": fields.hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "vocab_size": fields.vocab_size,
        "head_dim": head_dim,
        "norm_eps": fields.rms_norm_eps,
        "tie_embeddings": bool(fields.tie_word_embeddings),
    }


def read_rope(fields: DecoderFields, *, kinds: tuple[str, ...], default_theta: float, where: str) -> Rope:
    """Read the rotary embedding, in the form of either generation of transformers.

    Args:
        fields: fields of the `config.json`.
        kinds: supported types of frequency scaling.
        default_theta: base of the frequencies if the file has none.
        where: path of the file, for errors.

    Raises:
        CheckpointError: a value is invalid or not supported.
    """
    # transformers 5 also prefers the older key.
    key = "rope_scaling" if fields.rope_scaling else "rope_parameters"
    content = fields.rope_scaling or fields.rope_parameters or {}
    rope = parse_fields(RopeFields, content, where=where, inside=key)
    theta = rope.rope_theta or fields.rope_theta or default_theta
    if rope.kind() not in kinds:
        raise unsupported("rope_type", rope.kind(), where, allowed_values("rope_type", kinds))
    if rope.partial_rotary_factor not in SUPPORTED_VALUES["partial_rotary_factor"]:
        rule = allowed_values("partial_rotary_factor", (1.0,))
        raise unsupported("partial_rotary_factor", rope.partial_rotary_factor, where, rule)
    return Rope(rope.kind(), theta, key, content)


def context_len(fields: DecoderFields, *, where: str) -> int:
    """Return the maximum context length in tokens.

    Raises:
        CheckpointError: the file has none.
    """
    if fields.max_position_embeddings is None:
        raise missing_key("max_position_embeddings", where)
    return fields.max_position_embeddings


def decoder_config(
    model: Model,
    *,
    name: str,
    model_type: str,
    intermediate_size: int,
    dtype: str,
    max_seq_len: int | None,
    rope_scaling: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the keys of a `config.json` that all decoders have.

    Args:
        model: our description.
        name: the class in `transformers`.
        model_type: its `model_type`.
        intermediate_size: hidden width of a feed-forward layer or expert.
        dtype: torch's name of the weights' dtype, such as `bfloat16`.
        max_seq_len: maximum context length in tokens; 2048 if None.
        rope_scaling: frequency scaling with transformers' names, if any.
    """
    rope = dict(rope_scaling or {"rope_type": "default"})
    return {
        "architectures": [name],
        "model_type": model_type,
        "num_hidden_layers": model["num_layers"],
        "hidden_size": model["dim"],
        "num_attention_heads": model["num_heads"],
        "num_key_value_heads": model["num_kv_heads"],
        "head_dim": model["head_dim"],
        "intermediate_size": intermediate_size,
        "vocab_size": model["vocab_size"],
        "max_position_embeddings": max_seq_len or DEFAULT_MAX_SEQ_LEN,
        "rope_theta": model["rope_theta"],
        "rope_scaling": rope if rope_scaling else None,
        "rope_parameters": {**rope, "rope_theta": model["rope_theta"]},
        "rms_norm_eps": model["norm_eps"],
        "tie_word_embeddings": model["tie_embeddings"],
        "hidden_act": "silu",
        # The defaults are tokens 1 and 2 of one vocabulary; the right ids depend on the tokenizer.
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
        "dtype": dtype,
    }
