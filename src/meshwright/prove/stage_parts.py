"""The reference's gradients of shared parameters, stage by stage: what each copy's own backward should give.

Cut where the layout cuts the model, but run one after another in one process. A proof rests on none of it: it tells
which stages' parts are in a wrong gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshwright.config.schema import RunConfig
from meshwright.models.build import build_model
from meshwright.models.part import ModelPart
from meshwright.models.shapes import Part
from meshwright.prove.samples import DTYPE, Samples
from meshwright.prove.stages import Stages, stages_of


class _Parts(nn.Module):
    """A model's parts, each fed with what the one before gives."""

    def __init__(self, parts: list[ModelPart]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor, *told: Any) -> Tensor:
        for part in self.parts:
            x = part(x, *told)
        return x


def stage_gradients(
    config: RunConfig, weights: dict[str, Tensor], samples: Samples, indices: list[int]
) -> dict[str, Tensor]:
    """By key, [stage, *shape]; of parameters that are trained and on several stages.

    Args:
        weights: the whole model's, which it starts from.
        indices: the samples of the batch.
    """
    stages = stages_of(config)
    if stages is None or not any(len(parameter.sites) > 1 for parameter in stages.shared):
        return {}
    parts = [_part(config, stages, stage, weights) for stage in range(len(stages.ranks))]
    copies = [
        (parameter.key, stage, parts[stage].get_parameter(name))
        for parameter in stages.shared
        for stage, name in parameter.sites
    ]
    loss = samples.loss(_Parts(parts), indices)
    found = torch.autograd.grad(loss, [copy for *_, copy in copies], allow_unused=True, materialize_grads=True)
    result: dict[str, Tensor] = {}
    for (key, stage, copy), gradient in zip(copies, found, strict=True):
        result.setdefault(key, copy.new_zeros((len(parts), *copy.shape)))[stage] = gradient
    return result


def _part(config: RunConfig, stages: Stages, stage: int, weights: dict[str, Tensor]) -> ModelPart:
    part = Part(stages.layers[stage], stage=stage, num_stages=len(stages.ranks))
    model = build_model(config.model.spec(), dtype=DTYPE, part=part)
    model.to_empty(device="cpu")
    model.tie()
    with torch.no_grad():
        for name, parameter in model.whole_model_parameters():
            parameter.copy_(weights[name])
    return model
