"""Configuration of a diffusion transformer and its diffusion."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from meshwright.models.dit.description import DiTSpec
from meshwright.settings.section import ModelSection, Section


class DiTConfig(ModelSection):
    """The dimensions of a diffusion transformer."""

    kind: Literal["dit"] = Field("dit", description="family")
    num_layers: int = Field(4, ge=1, description="transformer blocks")
    dim: int = Field(128, ge=1, description="width of the residual stream")
    num_heads: int = Field(4, ge=1, description="attention heads")
    head_dim: int | None = Field(None, ge=1, description="width of a head; dim / num_heads by default")
    ffn_dim: int = Field(512, ge=1, description="hidden width of the feed-forward layer")
    image_size: int = Field(8, ge=1, description="height and width of an image, in pixels")
    patch_size: int = Field(2, ge=1, description="height and width of a patch, in pixels; each patch is a token")
    num_channels: int = Field(1, ge=1, description="channels per pixel: 1 grey, 3 RGB")
    num_frames: int = Field(1, ge=1, description="frames per sample; more than 1 for videos")
    patch_frames: int = Field(1, ge=1, description="frames per patch")
    num_classes: int = Field(10, ge=1, description="number of classes")
    zero_init: bool = Field(
        True,
        description="gates and output start at zero (adaLN-Zero); prove uses false, for gradients at step 1",
    )

    def spec(self) -> DiTSpec:
        """Return the model's dimensions with defaults filled in."""
        dimensions = self.model_dump(exclude={"kind", "head_dim"})
        return DiTSpec(head_dim=self.head_dim or self.dim // self.num_heads, **dimensions)


class DiffusionConfig(Section):
    """Training and sampling of a diffusion transformer."""

    num_timesteps: int = Field(1000, ge=2, description="diffusion timesteps from data to noise")
    schedule: Literal["cosine", "linear"] = Field("cosine", description="noise schedule")
    prediction: Literal["noise", "velocity"] = Field("noise", description="prediction target of the model")
    label_dropout: float = Field(0.1, ge=0, lt=1, description="fraction of training samples whose class is dropped")
    guidance: float = Field(2.0, ge=0, description="classifier-free guidance scale in sampling; 1 disables guidance")
    sampling_steps: int = Field(50, ge=1, description="DDIM sampling steps")
    num_samples: int = Field(100, ge=0, description="samples drawn at each validation, ordered by class; 0 for none")
