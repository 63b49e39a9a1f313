"""Read and write Hugging Face's `config.json` for Llama models.

Torch-free. Written files suit both generations: transformers 4 reads `rope_theta`, `rope_scaling` and `torch_dtype`;
transformers 5 merges the first two into `rope_parameters`, renames the third to `dtype`, and still accepts the old
keys. Checked against transformers 4.45 and 5.23.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshwright.errors import CheckpointError
from meshwright.models.llama.hf_parameter_names import ARCHITECTURE

SUPPORTED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu", "swish"),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
}
"""Supported values of architecture options that our Llama does not implement."""

DEFAULT_THETA = 10000.0


class JsonFields(BaseModel):
    """Base class for the strictly typed fields we use from a JSON object; other keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
FieldsT = TypeVar("FieldsT", bound=JsonFields)


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


class Llama3RopeFields(RopeFields):
    """Fields of Llama 3.1's RoPE scaling."""

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Count | None = None


class ArchitectureFields(JsonFields):
    """Fields that identify the architecture."""

    model_type: str
    architectures: list[str] | None = None


class LlamaFields(JsonFields):
    """Dimensions of a Llama model. Null is accepted for an omitted key wherever transformers accepts it."""

    num_hidden_layers: Count
    hidden_size: Count
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    intermediate_size: Count
    vocab_size: Count
    max_position_embeddings: Count | None = None
    rms_norm_eps: Positive = 1e-6
    rope_theta: Positive | None = None
    tie_word_embeddings: bool | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a Hugging Face directory.

    Raises:
        CheckpointError: the file is missing, unreadable or not a JSON object.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        state = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        state = f"is not JSON: {error}"
    else:
        if isinstance(content, dict):
            return content
        state = "is not a JSON object"
    raise CheckpointError(
        f"{path.name} {state}",
        where=str(path),
        rule="a Hugging Face model directory holds config.json and safetensors",
        fix="pass the directory of a Llama in Hugging Face's format",
    )


def parse_fields(kind: type[FieldsT], content: Mapping[str, Any], *, where: str, inside: str = "") -> FieldsT:
    """Validate a JSON object as an instance of `kind`.

    Args:
        kind: class of the fields.
        content: the JSON object.
        where: path of its file, for errors.
        inside: key of the object within the file; empty for the top level.

    Raises:
        CheckpointError: a key is missing or has an invalid value; the message names the first such key.
    """
    try:
        return kind.model_validate(dict(content))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in ([inside] if inside else []) + list(first["loc"]))
        if first["type"] == "missing":
            raise _missing_key(key, where) from None
        name = Path(where).name
        raise CheckpointError(
            f"{name} has {key} = {_short(first['input'])}",
            where=f"{where}, {key}",
            rule=first["msg"][:1].lower() + first["msg"][1:],
            fix=f"use the {name} that belongs to these weights",
        ) from None


def model_from_config(config: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Convert a `config.json` to our model description.

    Args:
        config: content of the file.
        where: path of the file, for errors.

    Raises:
        CheckpointError: the model is not a Llama or has unsupported options, or a key is missing or invalid.
    """
    _check_architecture(config, where)
    llama = parse_fields(LlamaFields, config, where=where)
    num_heads, num_kv_heads = llama.num_attention_heads, llama.num_key_value_heads or llama.num_attention_heads
    if num_heads % num_kv_heads:
        raise _unsupported("num_key_value_heads", num_kv_heads, where, f"must divide num_attention_heads = {num_heads}")
    head_dim = llama.head_dim or llama.hidden_size // num_heads
    if head_dim < 2 or head_dim % 2:
        raise _unsupported("head_dim", head_dim, where, "rotary embedding needs an even, positive head_dim")
    return {
        "kind": "llama",
        "num_layers": llama.num_hidden_layers,
        "dim": llama.hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "ffn_dim": llama.intermediate_size,
        "vocab_size": llama.vocab_size,
        "head_dim": head_dim,
        **_rope_of(llama, where),
        "norm_eps": llama.rms_norm_eps,
        "tie_embeddings": bool(llama.tie_word_embeddings),
    }


def config_from_model(model: Mapping[str, Any], *, dtype: str, max_seq_len: int | None) -> dict[str, Any]:
    """Convert our model description to a `config.json`.

    Args:
        model: our description.
        dtype: torch's name of the weights' dtype, such as `bfloat16`.
        max_seq_len: maximum context length in tokens; if None, the context length after rotary scaling, or 2048.
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
        # The defaults are tokens 1 and 2 of Llama 2's vocabulary; the right ids depend on the tokenizer.
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
        "dtype": dtype,
    }


def _check_architecture(config: Mapping[str, Any], where: str) -> None:
    fields = parse_fields(ArchitectureFields, config, where=where)
    architectures = fields.architectures or [ARCHITECTURE]
    if fields.model_type != "llama" or ARCHITECTURE not in architectures:
        raise CheckpointError(
            f"not a Llama: model_type {fields.model_type}, architectures {', '.join(architectures)}",
            where=where,
            rule=f"weights are imported from a {ARCHITECTURE} of model_type llama",
            fix="pass the directory of a Llama in Hugging Face's format",
        )
    for key, values in SUPPORTED_VALUES.items():
        if config.get(key) not in values:
            raise _unsupported(key, config[key], where, _allowed_values(key, values))


def _rope_of(llama: LlamaFields, where: str) -> dict[str, Any]:
    # transformers 5 also prefers the older key.
    key = "rope_scaling" if llama.rope_scaling else "rope_parameters"
    content = llama.rope_scaling or llama.rope_parameters or {}
    rope = parse_fields(RopeFields, content, where=where, inside=key)
    theta = rope.rope_theta or llama.rope_theta or DEFAULT_THETA
    kinds = ("default", "llama3")
    if rope.kind() not in kinds:
        raise _unsupported("rope_type", rope.kind(), where, _allowed_values("rope_type", kinds))
    if rope.partial_rotary_factor not in SUPPORTED_VALUES["partial_rotary_factor"]:
        rule = _allowed_values("partial_rotary_factor", (1.0,))
        raise _unsupported("partial_rotary_factor", rope.partial_rotary_factor, where, rule)
    if rope.kind() == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    scaled = parse_fields(Llama3RopeFields, content, where=where, inside=key)
    if scaled.low_freq_factor >= scaled.high_freq_factor:
        rule = f"high_freq_factor must exceed low_freq_factor = {scaled.low_freq_factor}"
        raise _unsupported(f"{key}.high_freq_factor", scaled.high_freq_factor, where, rule)
    original = scaled.original_max_position_embeddings or llama.max_position_embeddings
    if original is None:
        raise _missing_key("max_position_embeddings", where)
    scaling = {
        "factor": scaled.factor,
        "low_freq_factor": scaled.low_freq_factor,
        "high_freq_factor": scaled.high_freq_factor,
        "original_seq_len": original,
    }
    return {"rope_theta": theta, "rope_scaling": scaling}


def _missing_key(key: str, where: str) -> CheckpointError:
    name = Path(where).name
    return CheckpointError(
        f"{name} has no {key}",
        where=where,
        rule=f"{name} describes the weights beside it",
        fix=f"use the {name} that belongs to these weights",
    )


def _allowed_values(key: str, allowed: tuple[Any, ...]) -> str:
    return f"{key} is {' or '.join(repr(choice) for choice in allowed if choice is not None) or 'not set'}"


def _unsupported(key: str, value: Any, where: str, rule: str) -> CheckpointError:
    return CheckpointError(
        f"{key} = {_short(value)} is not supported",
        where=where,
        rule=rule,
        fix="import a different model",
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
