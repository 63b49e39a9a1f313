"""Configuration of a Llama model. Torch-free."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from meshwright.models.decoder.config import DecoderConfig
from meshwright.models.llama.description import LlamaSpec


class LlamaConfig(DecoderConfig):
    """Dimensions of a Llama model."""

    kind: Literal["llama"] = Field("llama", description="family: a built-in one, or package.module:Family for your own")

    def spec(self) -> LlamaSpec:
        """Return the model's dimensions with defaults filled in."""
        return LlamaSpec(**self.dimensions())
