"""From a model's spec to its module."""

from __future__ import annotations

import torch

from meshwright.models.dit import DiT
from meshwright.models.dit_spec import DiTSpec
from meshwright.models.llama import Llama
from meshwright.models.part import ModelPart
from meshwright.models.shapes import Part
from meshwright.models.spec import ModelSpec


def build_model(spec: ModelSpec, *, dtype: torch.dtype, part: Part | None = None) -> ModelPart:
    """The module, or a part of it, on the meta device, with parameters of `dtype` and no storage."""
    with torch.device("meta"):
        model: ModelPart = DiT(spec, part) if isinstance(spec, DiTSpec) else Llama(spec, part)
        return model.to(dtype)
