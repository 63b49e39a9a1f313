"""Configuration of a Llama model. Torch-free."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from meshwright.models.llama.description import LlamaSpec, RopeScaling
from meshwright.settings.section import ModelSection, Section


class RopeScalingConfig(Section):
    """RoPE frequency scaling of Llama 3.1."""

    factor: float = Field(8.0, gt=0, description="scale factor for the longest wavelengths")
    low_freq_factor: float = Field(1.0, gt=0, description="wavelengths above original_seq_len / this are scaled")
    high_freq_factor: float = Field(4.0, gt=0, description="wavelengths below original_seq_len / this are unchanged")
    original_seq_len: int = Field(8192, gt=0, description="context length before scaling, in tokens")


class LlamaConfig(ModelSection):
    """Dimensions of a Llama model."""

    kind: Literal["llama"] = Field("llama", description="family: a built-in one, or package.module:Family for your own")
    num_layers: int = Field(4, ge=1, description="transformer blocks")
    dim: int = Field(128, ge=1, description="width of the residual stream")
    num_heads: int = Field(4, ge=1, description="query heads")
    num_kv_heads: int = Field(4, ge=1, description="key/value heads (grouped-query attention when fewer)")
    head_dim: int | None = Field(None, ge=2, description="width of a head; dim / num_heads by default")
    ffn_dim: int = Field(352, ge=1, description="hidden width of the feed-forward layer")
    vocab_size: int = Field(256, ge=2, description="size of the vocabulary")
    tie_embeddings: bool = Field(False, description="share the embedding weight with the output head")
    rope_theta: float = Field(10000.0, gt=0, description="base of the rotary frequencies")
    rope_scaling: RopeScalingConfig | None = Field(None, description="RoPE frequency scaling of Llama 3.1")
    norm_eps: float = Field(1e-5, gt=0, description="epsilon of RMSNorm")

    def spec(self) -> LlamaSpec:
        """Return the model's dimensions with defaults filled in."""
        scaling = None if self.rope_scaling is None else RopeScaling(**self.rope_scaling.model_dump())
        dimensions = self.model_dump(exclude={"kind", "head_dim", "rope_scaling"})
        return LlamaSpec(head_dim=self.head_dim or self.dim // self.num_heads, rope_scaling=scaling, **dimensions)
