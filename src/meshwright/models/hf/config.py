"""The `model` section of a transformers model. Torch-free."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from meshwright.settings.section import ModelSection


def _as_mapping(value: Any) -> Any:
    """Read the pairs of a mapping, which a frozen section keeps as a tuple."""
    return tuple(sorted(value.items())) if isinstance(value, dict) else value


class HfConfig(ModelSection):
    """A causal language model of transformers."""

    kind: Literal["hf"] = Field("hf", description="family: a built-in one, or package.module:Family for your own")
    config: str = Field(
        "qwen3",
        min_length=1,
        description="folder of a model in Hugging Face's format, a config.json, or a model type of transformers, "
        "which is built small",
    )
    attention: Literal["auto", "sdpa", "eager"] = Field(
        "auto", description="attention of transformers: sdpa (PyTorch's kernels), or eager; auto takes the model's own"
    )
