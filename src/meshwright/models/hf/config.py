"""The `model` section of a transformers model. Torch-free."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from meshwright.settings.section import ModelSection


class HfConfig(ModelSection):
    """A causal language model of transformers."""

    kind: Literal["hf"] = Field("hf", description="family: a built-in one, or package.module:Family for your own")
    config: str = Field(
        "qwen3",
        min_length=1,
        description="folder of a model in Hugging Face's format, a config.json, or a model type of transformers, "
        "which is built small",
    )
    weights: Literal["random", "folder"] = Field(
        "random",
        description="initial weights: random as the model defines them, or those in the folder of model.config",
    )
    attention: Literal["auto", "sdpa", "eager"] = Field(
        "auto", description="attention of transformers: sdpa (PyTorch's kernels), or eager; auto takes the model's own"
    )
