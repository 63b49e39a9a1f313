"""Names of `transformers` that it does not document, or may move. Checked on 5.23.0.

Nothing else in this room reads one; the package is imported inside the functions, for it is optional.
"""

from __future__ import annotations

from typing import Any


def causal_names() -> tuple[str, ...]:
    """Return the model types that `AutoModelForCausalLM` knows, in its order."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def config_class(model_type: str) -> type[Any]:
    """Return the configuration class of a model type, whole: with the vision or audio parts that it may have."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found: type[Any] = CONFIG_MAPPING[model_type]
    return found


def is_causal_config(config: type[Any]) -> bool:
    """Whether `AutoModelForCausalLM` builds a model from this configuration class itself."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return config in MODEL_FOR_CAUSAL_LM_MAPPING


def text_config_class(config: type[Any]) -> type[Any]:
    """Return the class of the text model's part of a configuration, or the class itself if it has no parts."""
    if "text_config" not in config.sub_configs:
        return config
    return type(config().text_config)
