"""A model class of `transformers` as a value: what conversion needs to know of it, and what all our decoders share.

Our models are given as `ModelFacts.identity`, the form stored in checkpoints. Our rotary embedding pairs elements like
Hugging Face's (first half with second half), so weights map by name alone.

Written files suit both generations: transformers 4 reads `rope_theta`, `rope_scaling` and `torch_dtype`; transformers 5
merges the first two into `rope_parameters`, renames the third to `dtype`, and still accepts the old keys. Checked
against transformers 4.45 and 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from meshwright.errors import CheckpointError
from meshwright.models.hf_format.checks import (
    Count,
    JsonFields,
    Positive,
    allowed_values,
    missing_key,
    parse_fields,
    train_command,
    unsupported,
)
from meshwright.units import counted

Model = Mapping[str, Any]
"""Our description of a model."""


@dataclass(frozen=True)
class MappedTensor:
    """One of our parameters, and the tensor or tensors of Hugging Face's that hold its values."""

    name: str
    shape: tuple[int, ...]
    """Shape of ours: (out, in) for matrix weights."""
    theirs: tuple[str, ...]
    is_stacked: bool = False
    """Whether ours stacks theirs along a new first dim; otherwise there is one of theirs, with our shape."""

    def their_shape(self) -> tuple[int, ...]:
        return self.shape[1:] if self.is_stacked else self.shape

    def inside(self, ours: str, theirs: str) -> MappedTensor:
        """Return the tensor inside module `ours` of our model, and inside module `theirs` of theirs."""
        return replace(self, name=f"{ours}.{self.name}", theirs=tuple(f"{theirs}.{name}" for name in self.theirs))


class ConfigWriter(Protocol):
    """Conversion of our description to the content of a `config.json`."""

    def __call__(self, model: Model, *, dtype: str, max_seq_len: int | None) -> dict[str, Any]:
        """Return the configuration with torch's name of a dtype; without a maximum context length, the family chooses
        one."""


class ConfigReader(Protocol):
    """Conversion of the content of a `config.json` to our description."""

    def __call__(self, config: Mapping[str, Any], *, where: str) -> dict[str, Any]:
        """Return our description, given the content of the file and its path for errors.

        Raises:
            CheckpointError: the model is another one or has unsupported options, or a key is missing or invalid.
        """


class ModelCheck(Protocol):
    """Check of what only some models of a family are."""

    def __call__(self, model: Model, *, where: str) -> None:
        """Raise a CheckpointError if the architecture cannot express the model."""


@dataclass(frozen=True)
class Repeated:
    """A count in `config.json` of modules with tensors of their own."""

    key: str
    """Key in `config.json`."""
    ours: str
    """Key in our description."""
    noun: str


LAYERS = Repeated("num_hidden_layers", "num_layers", "layer")


def check_no_window(model: Model, *, where: str) -> None:
    """Raise a CheckpointError if the model has a sliding window; the architecture can express all other models of the
    family."""
    if (window := model.get("window")) is not None:
        raise CheckpointError(
            f"the model has a sliding window of {counted(window, 'token')} (model.window)",
            where=where,
            rule="only models without a sliding window can be exported to Hugging Face's format",
            fix="export a checkpoint of a model without model.window",
        )


@dataclass(frozen=True)
class Architecture:
    """A causal language model of `transformers`, and its conversion to and from one of our families."""

    kind: str
    """Our family's name, as in checkpoints."""
    noun: str
    """The architecture in messages, after "a"."""
    name: str
    """The class in `transformers`."""
    model_type: str
    """`model_type` in `config.json`."""
    read_config: ConfigReader
    write_config: ConfigWriter
    tensors: Callable[[Model], Iterable[MappedTensor]]
    """All parameters, in model order."""
    repeated: tuple[Repeated, ...] = (LAYERS,)
    counters: Callable[[Model], Mapping[str, tuple[int, ...]]] = lambda model: {}
    """Shapes of our saved int64 counters by name: zero after an import, not exported."""
    check_model: ModelCheck = check_no_window


EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def decoder_tensors(model: Model, feed_forward: Callable[[Model], Iterable[MappedTensor]]) -> Iterator[MappedTensor]:
    """Yield the parameters of a decoder in model order; `feed_forward` yields those of a block after `ffn_norm`, with
    names inside the block."""
    dim, vocab_size = model["dim"], model["vocab_size"]
    block = [*_attention(model), *feed_forward(model)]
    yield MappedTensor("embed.weight", (vocab_size, dim), (EMBEDDING,))
    for i in range(model["num_layers"]):
        for tensor in block:
            yield tensor.inside(f"blocks.{i}", f"model.layers.{i}")
    yield MappedTensor("norm.weight", (dim,), ("model.norm.weight",))
    if not model["tie_embeddings"]:
        yield MappedTensor("head.weight", (vocab_size, dim), (HEAD,))


def _attention(model: Model) -> Iterator[MappedTensor]:
    dim = model["dim"]
    q_dim, kv_dim = model["num_heads"] * model["head_dim"], model["num_kv_heads"] * model["head_dim"]
    yield MappedTensor("attention_norm.weight", (dim,), ("input_layernorm.weight",))
    yield MappedTensor("attention.wq.weight", (q_dim, dim), ("self_attn.q_proj.weight",))
    yield MappedTensor("attention.wk.weight", (kv_dim, dim), ("self_attn.k_proj.weight",))
    yield MappedTensor("attention.wv.weight", (kv_dim, dim), ("self_attn.v_proj.weight",))
    yield MappedTensor("attention.wo.weight", (dim, q_dim), ("self_attn.o_proj.weight",))
    yield MappedTensor("ffn_norm.weight", (dim,), ("post_attention_layernorm.weight",))


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
    """Raise a CheckpointError if a `config.json` is of another architecture, or an option has a value that we do not
    implement; one that supports None may be left out."""
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
    """Return the dimensions that all decoders have, with our names, except those of the feed-forward layers. Raise a
    CheckpointError if they contradict each other, or rotary embedding does not support them."""
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
    """Read the rotary embedding, in the form of either generation of transformers, with frequency scaling of these
    kinds, or raise a CheckpointError."""
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
    """Return the maximum context length in tokens, or raise a CheckpointError if the file has none."""
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
    """Return the keys of a `config.json` that all decoders have; `rope_scaling` is frequency scaling with transformers'
    names."""
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
