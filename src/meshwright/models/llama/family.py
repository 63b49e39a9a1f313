"""The Llama family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from meshwright.models.contract.family import OtherWeights
from meshwright.models.decoder.decoder_family import DecoderFamily
from meshwright.models.decoder.description import DecoderConfig, DecoderSpec


class LlamaConfig(DecoderConfig):
    """Dimensions of a Llama model."""

    kind: Literal["llama"] = Field("llama", description="family: a built-in one, or package.module:Family for your own")

    def spec(self) -> LlamaSpec:
        return LlamaSpec(**self.dimensions())


class LlamaFamily(DecoderFamily):
    """Llama (Touvron et al. 2023; The Llama 3 herd of models, 2024), trained on text."""

    sections = {"model": LlamaConfig}

    def other_weights(self) -> OtherWeights:
        from meshwright.models.hf_format.weights import HuggingFaceWeights
        from meshwright.models.llama.hf_llama import LLAMA

        return HuggingFaceWeights(LLAMA)


FAMILY = LlamaFamily()


@dataclass(frozen=True)
class LlamaSpec(DecoderSpec):
    kind: ClassVar[str] = "llama"
