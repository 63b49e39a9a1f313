"""Tiny configurations of the causal language models of `transformers`: the same layers, small enough to prove.

A configuration has what the type's own default has, with small sizes (`tiny_sizes`), each kind of layer among its four
layers, and what single types need besides (`tiny_by_hand`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any

from meshwright.errors import ConfigError
from meshwright.models.hf import private
from meshwright.models.hf.tiny_by_hand import BY_HAND, UNSUPPORTED
from meshwright.models.hf.tiny_sizes import ALTERNATING_LISTS, LEADING_LISTS, NUM_LAYERS, SIZES, WINDOW

__all__ = ["UNSUPPORTED", "causal_types", "tiny_config", "tiny_fields"]


@cache
def causal_types() -> tuple[str, ...]:
    """Return the model types of all causal language models, in the order of `transformers`.

    A type whose text model is another type's is left out: `gemma3` is `gemma3_text` behind images.
    """
    return tuple(name for name in private.causal_names() if text_type(name) == name)


def text_type(model_type: str) -> str:
    """Return the model type that a causal type's text model has by itself, or the type if it has none."""
    if model_type not in private.causal_names():
        raise ConfigError(
            f"{model_type!r} is no causal language model of the installed transformers",
            where="model.config",
            rule="a model type that AutoModelForCausalLM knows",
            fix="model.config=qwen3, or another of meshwright.models.hf.tiny_config.causal_types()",
        )
    config = private.config_class(model_type)
    if model_type in UNSUPPORTED:
        return config.model_type
    text = private.text_config_class(config)
    return text.model_type if private.is_causal_config(text) else model_type


def tiny_fields(model_type: str) -> dict[str, Any]:
    """Return the fields of the text model's tiny configuration that differ from its default.

    Args:
        model_type: a causal model type of `transformers`, such as `qwen3`.
    """
    model_type = text_type(model_type)
    text = private.text_config_class(private.config_class(model_type))
    default = _values(text())
    num_layers = _num_layers(default)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(text):
        name = field.name
        if name in SIZES:
            small = _small(name, default)
            if small != default.get(name):
                fields[name] = small
        elif name in (*ALTERNATING_LISTS, *LEADING_LISTS):
            kinds = _kinds(name, default, num_layers)
            if kinds:
                fields[name] = kinds
    return fields | BY_HAND.get(model_type, {})


def tiny_config(model_type: str) -> Any:
    """Return a tiny configuration of a causal model type's text model, as an object of `transformers`.

    A text model without a type of its own is given inside the configuration of the whole.
    """
    model_type = text_type(model_type)
    whole = private.config_class(model_type)
    text = private.text_config_class(whole)
    fields = tiny_fields(model_type)
    return whole(**fields) if text is whole else whole(text_config=fields)


def _values(config: Any) -> dict[str, Any]:
    values = dict(vars(config))
    return values | {alias: values[name] for alias, name in config.attribute_map.items() if name in values}


def _num_layers(default: Mapping[str, Any]) -> int | None:
    for name, value in default.items():
        if SIZES.get(name) == NUM_LAYERS and "layer" in name and isinstance(value, int):
            return value
    return None


def _small(name: str, default: Mapping[str, Any]) -> Any:
    old = default.get(name)
    small = SIZES[name]
    if name == "num_key_value_heads" and "qk_nope_head_dim" in default:
        return SIZES["num_attention_heads"]  # keys of all heads come from one latent
    if name == "sliding_window" and "use_sliding_window" in default:
        return WINDOW
    if old is None:
        return None
    return [small] * NUM_LAYERS if isinstance(old, list) and name != "eos_token_id" else small


def _kinds(name: str, default: Mapping[str, Any], num_layers: int | None) -> list[Any]:
    old = default.get(name)
    if not isinstance(old, list) or (num_layers is not None and len(old) != num_layers):
        return []
    kinds = list(dict.fromkeys(old))
    if kinds == ["full_attention"] and "use_sliding_window" in default:
        kinds = ["sliding_attention", "full_attention"]
    if name in LEADING_LISTS:
        return [kinds[min(layer, len(kinds) - 1)] for layer in range(NUM_LAYERS)]
    return [kinds[layer % len(kinds)] for layer in range(NUM_LAYERS)]
