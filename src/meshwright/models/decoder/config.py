"""Configuration of a decoder."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pydantic import Field

from meshwright.models.decoder.description import DecoderSpec, RopeScaling
from meshwright.settings.section import ModelSection, Section


class RopeScalingConfig(Section):
    """RoPE frequency scaling for longer contexts."""

    factor: float = Field(8.0, gt=0, description="scale factor for the longest wavelengths")
    low_freq_factor: float = Field(1.0, gt=0, description="wavelengths above original_seq_len / this are scaled")
    high_freq_factor: float = Field(4.0, gt=0, description="wavelengths below original_seq_len / this are unchanged")
    original_seq_len: int = Field(8192, gt=0, description="context length before scaling, in tokens")


class DecoderConfig(ModelSection):
    """Dimensions of a decoder. A family adds its `kind`."""

    num_layers: int = Field(4, ge=1, description="transformer blocks")
    dim: int = Field(128, ge=1, description="width of the residual stream")
    num_heads: int = Field(4, ge=1, description="query heads")
    num_kv_heads: int = Field(4, ge=1, description="key/value heads (grouped-query attention when fewer)")
    head_dim: int | None = Field(None, ge=2, description="width of a head; dim / num_heads by default")
    ffn_dim: int = Field(352, ge=1, description="hidden width of the feed-forward layer")
    vocab_size: int = Field(256, ge=2, description="size of the vocabulary")
    tie_embeddings: bool = Field(False, description="share the embedding weight with the output head")
    rope_theta: float = Field(10000.0, gt=0, description="base of the rotary frequencies")
    rope_scaling: RopeScalingConfig | None = Field(None, description="RoPE frequency scaling for longer contexts")
    window: int | None = Field(
        None, ge=1, description="sliding window of attention in tokens; layers attend to all earlier tokens by default"
    )
    global_every: int = Field(
        0, ge=0, description="with model.window, every n-th layer attends to all earlier tokens; 0 if none does"
    )
    norm_eps: float = Field(1e-5, gt=0, description="epsilon of RMSNorm")

    def spec(self) -> DecoderSpec:
        """Return the model's dimensions with defaults filled in."""
        raise NotImplementedError

    def dimensions(self) -> dict[str, Any]:
        """Return the fields of `DecoderSpec`."""
        names = {field.name for field in fields(DecoderSpec)} - {"head_dim", "rope_scaling"}
        scaling = None if self.rope_scaling is None else RopeScaling(**self.rope_scaling.model_dump())
        head_dim = self.head_dim or self.dim // self.num_heads
        return {"head_dim": head_dim, "rope_scaling": scaling, **self.model_dump(include=names)}
