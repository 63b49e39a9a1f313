"""The keys of a diffusion transformer, and of its diffusion. Torch-free."""

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
    head_dim: int | None = Field(None, ge=1, description="width of a head; dim / num_heads when not given")
    ffn_dim: int = Field(512, ge=1, description="hidden width of the feed-forward layer")
    image_size: int = Field(8, ge=1, description="height and width of a picture, in pixels")
    patch_size: int = Field(2, ge=1, description="height and width of a patch, which is a token")
    num_channels: int = Field(1, ge=1, description="numbers a pixel: 1 grey, 3 colours")
    num_frames: int = Field(1, ge=1, description="frames a sample; over 1 it is a video")
    patch_frames: int = Field(1, ge=1, description="frames that a patch goes through")
    num_classes: int = Field(10, ge=1, description="classes that a picture can be of")
    zero_init: bool = Field(
        True, description="gates and output start at zero (adaLN-Zero); prove sets false, to see gradients at step 1"
    )

    def spec(self) -> DiTSpec:
        """The model's dimensions as a value, with what is not given filled in."""
        given = self.model_dump(exclude={"kind", "head_dim"})
        return DiTSpec(head_dim=self.head_dim or self.dim // self.num_heads, **given)


class DiffusionConfig(Section):
    """How a diffusion transformer is trained, and how pictures are drawn from it."""

    num_timesteps: int = Field(1000, ge=2, description="steps from a picture to noise")
    schedule: Literal["cosine", "linear"] = Field("cosine", description="how noise grows over the steps")
    prediction: Literal["noise", "velocity"] = Field("noise", description="what the model predicts")
    label_dropout: float = Field(0.1, ge=0, lt=1, description="part of the samples trained without their class")
    guidance: float = Field(2.0, ge=0, description="scale of classifier-free guidance in sampling; 1 is without")
    sampling_steps: int = Field(50, ge=1, description="DDIM steps that draw a picture")
    num_samples: int = Field(100, ge=0, description="pictures drawn at each validation, class after class; 0: none")
