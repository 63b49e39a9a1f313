"""The `model` section of the configuration. Torch-free, so that planning and validation are fast."""

from __future__ import annotations

from pydantic import Field

from meshwright.nn.attention.mask_spec import MaskSpec
from meshwright.settings.section import ModelSection

MASK = MaskSpec(causal=True)


class GptConfig(ModelSection):
    """The dimensions of a small GPT."""

    num_layers: int = Field(4, ge=1, description="blocks")
    dim: int = Field(64, ge=1, description="width of the stream")
    num_heads: int = Field(4, ge=1, description="attention heads")
    ffn_dim: int = Field(256, ge=1, description="hidden width of the MLP")
    vocab_size: int = Field(256, ge=2, description="size of the vocabulary")
    max_len: int = Field(256, ge=1, description="number of learned positions")
    activation_weight: float = Field(1e-3, ge=0, description="weight of the mean square of each block's output")
