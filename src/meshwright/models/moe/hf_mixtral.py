"""Hugging Face's Mixtral, for import and export: `config.json`, and names of parameters.

A Mixtral (Jiang et al. 2024) has experts in every layer, none of them shared, and softmax weights of the chosen experts
that sum to 1. Keys that matter only to training there, such as `router_aux_loss_coef` and `router_jitter_noise`, are
ignored: they are options of a run here. Files have one tensor per expert and projection; ours stacks all experts'
tensors of a projection. transformers 5 stacks them in memory as well, but its files have not changed (5.23).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.errors import CheckpointError
from meshwright.models.hf_format.architecture import (
    LAYERS,
    SUPPORTED_VALUES,
    Architecture,
    DecoderFields,
    MappedTensor,
    Model,
    Repeated,
    check_architecture,
    check_no_window,
    context_len,
    decoder_config,
    decoder_dimensions,
    decoder_tensors,
    read_rope,
)
from meshwright.models.hf_format.checks import Count, Positive, parse_fields, unsupported

ARCHITECTURE = "MixtralForCausalLM"
MODEL_TYPE = "mixtral"

DEFAULT_THETA = 1e6

ROUTING: Mapping[str, Any] = {
    "rope_scaling": None,
    "num_dense_layers": 0,
    "num_shared_experts": 0,
    "score": "softmax",
    "normalize": True,
    "route_scale": 1.0,
    "num_groups": 1,
    "top_groups": 1,
    "balance_bias": False,
}
"""Values of our description that make a model a Mixtral."""


class MixtralFields(DecoderFields):
    """Dimensions of a Mixtral, with transformers' defaults."""

    num_key_value_heads: Count | None = 8
    rms_norm_eps: Positive = 1e-5
    num_local_experts: Count = 8
    num_experts_per_tok: Count = 2
    sliding_window: Count | None = None


def model_from_config(config: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Convert a `config.json` to our model description (see `ConfigReader`)."""
    check_architecture(
        config, name=ARCHITECTURE, model_type=MODEL_TYPE, noun="Mixtral", supported=SUPPORTED_VALUES, where=where
    )
    mixtral = parse_fields(MixtralFields, config, where=where)
    _check_experts(mixtral, where)
    rope = read_rope(mixtral, kinds=("default",), default_theta=DEFAULT_THETA, where=where)
    return {
        "kind": "moe",
        **decoder_dimensions(mixtral, where=where),
        "ffn_dim": mixtral.intermediate_size,  # of dense layers, of which there are none
        "rope_theta": rope.theta,
        "num_experts": mixtral.num_local_experts,
        "top_k": mixtral.num_experts_per_tok,
        "expert_dim": mixtral.intermediate_size,
        **ROUTING,
    }


def config_from_model(model: Model, *, dtype: str, max_seq_len: int | None) -> dict[str, Any]:
    """Convert our description of a Mixtral, accepted by `check_is_mixtral`, to a `config.json`."""
    config = decoder_config(
        model,
        name=ARCHITECTURE,
        model_type=MODEL_TYPE,
        intermediate_size=model["expert_dim"],
        dtype=dtype,
        max_seq_len=max_seq_len,
    )
    experts = {"num_local_experts": model["num_experts"], "num_experts_per_tok": model["top_k"]}
    return config | experts | {"sliding_window": None}


def check_is_mixtral(model: Model, *, where: str) -> None:
    """Raise a CheckpointError if a mixture of experts is no Mixtral, the only one that has an export format; its
    message names all that is different."""
    check_no_window(model, where=where)
    different = [key for key, value in ROUTING.items() if model[key] != value]
    if different:
        found = ", ".join(f"model.{key} = {_toml(model[key])}" for key in different)
        wanted = ", ".join(f"model.{key} = {_toml(ROUTING[key])}" for key in different)
        raise CheckpointError(
            f"the model is not a Mixtral: {found}",
            where=where,
            rule=f"only a Mixtral can be exported to Hugging Face's format, and it has {wanted}",
            fix="export a checkpoint of a model with these values",
        )


def _check_experts(mixtral: MixtralFields, where: str) -> None:
    if mixtral.num_experts_per_tok > mixtral.num_local_experts:
        rule = f"at most num_local_experts = {mixtral.num_local_experts}"
        raise unsupported("num_experts_per_tok", mixtral.num_experts_per_tok, where, rule, contradicts=True)
    window = mixtral.sliding_window
    if window is not None and window < context_len(mixtral, where=where):
        rule = f"sliding_window is null or at least max_position_embeddings = {mixtral.max_position_embeddings}"
        raise unsupported("sliding_window", window, where, rule)


def _toml(value: Any) -> str:
    """Return a value as written in a configuration."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def mapped_tensors(model: Model) -> Iterator[MappedTensor]:
    return decoder_tensors(model, _feed_forward)


def load_counters(model: Model) -> Mapping[str, tuple[int, ...]]:
    """Return the names and shapes of the routers' counters of tokens per expert."""
    return {f"blocks.{i}.moe.router.load.value": (model["num_experts"],) for i in range(model["num_layers"])}


def _feed_forward(model: Model) -> Iterator[MappedTensor]:
    num_experts, dim, expert_dim = model["num_experts"], model["dim"], model["expert_dim"]
    gate = "block_sparse_moe.gate.weight"  # the router; a projection of an expert in ours is also called gate
    yield MappedTensor("moe.router.gate.weight", (num_experts, dim), (gate,))
    yield _stack("gate", "w1", num_experts, (expert_dim, dim))
    yield _stack("up", "w3", num_experts, (expert_dim, dim))
    yield _stack("down", "w2", num_experts, (dim, expert_dim))


def _stack(ours: str, theirs: str, num_experts: int, shape: tuple[int, int]) -> MappedTensor:
    names = tuple(f"block_sparse_moe.experts.{j}.{theirs}.weight" for j in range(num_experts))
    return MappedTensor(f"moe.experts.{ours}", (num_experts, *shape), names, is_stacked=True)


MIXTRAL = Architecture(
    kind="moe",
    noun="Mixtral",
    name=ARCHITECTURE,
    model_type=MODEL_TYPE,
    read_config=model_from_config,
    write_config=config_from_model,
    tensors=mapped_tensors,
    repeated=(LAYERS, Repeated("num_local_experts", "num_experts", "expert")),
    counters=load_counters,
    check_model=check_is_mixtral,
)
