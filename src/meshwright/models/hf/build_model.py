"""Build a transformers model from its configuration, on whatever device is current."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.foreign.origin import trained_plainly
from meshwright.models.hf import private
from meshwright.models.hf.config import LoraConfig
from meshwright.models.hf.lora import inject_adapters
from meshwright.models.hf.source import KEY, Source
from meshwright.models.hf.tiny_config import not_causal, tiny_config


def load_config(source: Source) -> Any:
    """Return transformers' configuration of the text model, without dropout.

    Raises:
        ConfigError: transformers has no causal language model of this type, or refuses the configuration.
    """
    config = original_config(source)
    for name, _ in [*dropouts(config)]:
        setattr(config, name, 0.0)
    config.use_cache = False
    return config


def original_config(source: Source) -> Any:
    """Return transformers' configuration of the text model as it is."""
    if source.fields:
        config = whole_config(source)
    else:
        with private.quiet():  # notes about sizes that are small on purpose
            config = tiny_config(source.model_type)
    for found in (config.get_text_config(), config):
        if private.is_causal_config(type(found)):
            return found
    raise not_causal(source.model_type)


def whole_config(source: Source, *, aloud: bool = False) -> Any:
    """Return the configuration of a config.json, with parts for images or audio that it may have.

    Args:
        source: a folder or a config.json.
        aloud: whether transformers says what it thinks of it, once a process.

    Raises:
        ConfigError: transformers has no model of this type, or refuses the configuration.
    """
    if not private.is_known(source.model_type):
        raise not_causal(source.model_type)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(source.fields, "utf-8")
        try:
            return private.read_config(folder, aloud=aloud)
        except Exception as error:
            raise _no_model(source.model_type, f"{type(error).__name__}: {error}") from error


def dropouts(config: Any) -> Iterator[tuple[str, float]]:
    """Yield the names and values of probabilities of dropout, which depend on the layout of random numbers."""
    for name, value in vars(config).items():
        if isinstance(value, float) and ("drop" in name or name.endswith("pdrop") or "jitter" in name):
            yield name, value


def build_model(
    config: Any, *, attention: str = "auto", experts: str | None = "eager", lora: LoraConfig | None = None
) -> nn.Module:
    """Build the model with its plain forward, in training mode, with linear layers that can defer their gradients.

    Args:
        config: return value of `load_config`.
        attention: `model.attention`.
        experts: implementation of experts; `eager` runs in every dtype, None is transformers' choice.
        lora: adapters of its linear layers, or None.
    """
    try:
        model: nn.Module = private.causal_lm(config, attention=attention, experts=experts)
    except ConfigError:
        raise
    except Exception as error:
        raise _no_model(config.model_type, f"{type(error).__name__}: {error}") from error
    if lora is not None:
        inject_adapters(model, config, lora)
    transposed = private.transposed_linear()
    for module in model.modules():
        if type(module) is transposed.__base__:
            module.__class__ = transposed
    return trained_plainly(model)


def _no_model(model_type: str, why: str) -> ConfigError:
    return ConfigError(
        f"transformers can't build a causal language model of {model_type}: {' '.join(why.split())[:300]}",
        where=KEY,
        rule="model.config names a causal language model of transformers (AutoModelForCausalLM)",
        fix=f"the config.json that save_pretrained or hf download wrote, or {KEY}=qwen3",
    )


def config_fields(config: Any) -> dict[str, Any]:
    """Return what determines the parameters and their meaning, as JSON values."""
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    ignored = ("transformers_version", "architectures", "dtype", "torch_dtype", "_name_or_path", "use_cache")
    return {name: value for name, value in fields.items() if name not in ignored and not name.startswith("_")}
