"""Tiny configurations of the causal language models of `transformers`: the same layers, small enough to prove.

A configuration has what the type's own default has, with small sizes (`tiny_sizes`), each kind of layer among its four
layers, and what single types need besides (`tiny_by_hand`).
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
from collections.abc import Mapping
from functools import cache
from typing import Any

from meshwright.errors import ConfigError, ModelError
from meshwright.models.hf import private
from meshwright.models.hf.source import CONFIG_FILE, KEY, transformers_version
from meshwright.models.hf.tiny_by_hand import BY_HAND, UNSUPPORTED
from meshwright.models.hf.tiny_sizes import ALTERNATING_LISTS, LEADING_LISTS, NUM_LAYERS, PER_LAYER, SIZES

__all__ = ["UNSUPPORTED", "causal_types", "tiny_config", "tiny_fields"]


@cache
def causal_types() -> tuple[str, ...]:
    """Return the model types of all causal language models, in the order of `transformers`.

    A type whose text model is another type's is left out: `gemma3` is `gemma3_text` behind images. Those in
    `UNSUPPORTED` are among them.
    """
    return tuple(name for name in private.causal_names() if text_type(name) == name)


def text_type(model_type: str) -> str:
    """Return the model type of a causal type's text model, or the type itself if its text model has none."""
    if model_type not in private.causal_names():
        raise not_causal(model_type, is_name=True)
    config = private.config_class(model_type)
    if model_type in UNSUPPORTED:
        return model_type
    text = private.text_config_class(config)
    return str(text.model_type) if private.is_causal_config(text) else model_type


def tiny_fields(model_type: str) -> dict[str, Any]:
    """Return the fields that make the configuration of a causal type's text model tiny.

    Args:
        model_type: a model type of `transformers`, such as `qwen3`.
    """
    model_type = text_type(model_type)
    if model_type in UNSUPPORTED:
        raise ModelError(
            f"{model_type} has no tiny configuration: {UNSUPPORTED[model_type]}",
            where="model.config",
            rule="a model whose logits for each token follow from that token and those before it",
            fix="model.config=qwen3",
        )
    text = private.text_config_class(private.config_class(model_type))
    default = _values(text())
    fields: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(text)):
        if name in SIZES:
            small = _small(name, default)
            if small != default.get(name):
                fields[name] = small
        elif kinds := _kinds(name, default):
            fields[name] = kinds
    return fields | copy.deepcopy(dict(BY_HAND.get(model_type, {})))


def tiny_config(model_type: str) -> Any:
    """Return a tiny configuration of a causal type's text model, as an object of `transformers`.

    A text model that has no type of its own is inside the configuration of the whole.
    """
    fields = tiny_fields(model_type)
    whole = private.config_class(text_type(model_type))
    is_whole = private.text_config_class(whole) is whole
    return whole(**fields) if is_whole else whole(text_config=fields)


def not_causal(model_type: str, *, is_name: bool = False) -> ConfigError:
    """Return the error for a model type without a causal language model; `is_name` if no folder has given it."""
    known = private.is_known(model_type)  # such as an encoder, which no name is a misspelling of
    nearest = [] if known else difflib.get_close_matches(model_type.lower(), private.causal_names(), n=1)
    newer = "" if known else ", or if the type is newer: pip install --upgrade transformers"
    missing = f"there is no folder {model_type}, and " if is_name else ""
    path = f", or the path of a folder with a {CONFIG_FILE}" if is_name else ""
    return ConfigError(
        f"{missing}{model_type!r} is no causal language model of the installed transformers {transformers_version()}",
        where=KEY,
        rule="a model type that AutoModelForCausalLM knows",
        fix=f"{KEY}={nearest[0] if nearest else 'qwen3'}{path}{newer}",
    )


def _values(config: Any) -> dict[str, Any]:
    """Values of a configuration by all names they go by."""
    values = dict(vars(config))
    return values | {alias: values[name] for alias, name in config.attribute_map.items() if name in values}


def _small(name: str, default: Mapping[str, Any]) -> Any:
    old = default.get(name)
    small = SIZES[name]
    if name == "num_key_value_heads" and "qk_nope_head_dim" in default:
        return SIZES["num_attention_heads"]  # keys of all heads come from one latent vector
    if name == "sliding_window" and "use_sliding_window" in default:
        return small  # None as long as windows are off, and they are turned on
    if old is None:
        return None
    return [small] * NUM_LAYERS if isinstance(old, list) and name in PER_LAYER else small


def _kinds(name: str, default: Mapping[str, Any]) -> list[Any]:
    """A kind for each layer, if `name` is such a list: every kind that the default has."""
    old = default.get(name)
    if name not in (*ALTERNATING_LISTS, *LEADING_LISTS) or not isinstance(old, list):
        return []
    kinds = list(dict.fromkeys(old))
    if kinds == ["full_attention"] and "use_sliding_window" in default:
        kinds = ["sliding_attention", "full_attention"]
    if name in LEADING_LISTS:
        return [kinds[min(layer, len(kinds) - 1)] for layer in range(NUM_LAYERS)]
    return [kinds[layer % len(kinds)] for layer in range(NUM_LAYERS)]
