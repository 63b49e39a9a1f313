"""The Llama family."""

from __future__ import annotations

from meshwright.models.contract.family import OtherWeights
from meshwright.models.decoder.decoder_family import DecoderFamily
from meshwright.models.llama.config import LlamaConfig


class LlamaFamily(DecoderFamily):
    """Llama (Touvron et al. 2023; The Llama 3 herd of models, 2024), trained on text."""

    sections = {"model": LlamaConfig}

    def other_weights(self) -> OtherWeights:
        """Return import and export of Hugging Face's format."""
        from meshwright.models.huggingface.weights import HuggingFaceWeights
        from meshwright.models.llama.hf_llama import LLAMA

        return HuggingFaceWeights(LLAMA)


FAMILY = LlamaFamily()
