"""Dimensions of a Llama model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from meshwright.models.decoder.description import DecoderSpec


@dataclass(frozen=True)
class LlamaSpec(DecoderSpec):
    """Dimensions of a Llama model (Touvron et al. 2023; The Llama 3 herd of models, 2024)."""

    kind: ClassVar[str] = "llama"
