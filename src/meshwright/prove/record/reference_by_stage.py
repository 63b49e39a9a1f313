"""The reference's gradients of shared parameters, stage by stage: what each copy's own backward should give.

Cut where the layout cuts the model, but run one after another in one process. A proof rests on none of it: it tells
which stages' parts are in a wrong gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshwright.config.facts_for_family import model_facts, run_facts
from meshwright.config.schema import RunConfig
from meshwright.models.contract.build_module import build_part, tie_parameters
from meshwright.models.contract.model_facts import Part
from meshwright.models.contract.task import Reference
from meshwright.nn.step_handles import auxiliary_losses
from meshwright.prove.record.evidence import DTYPE
from meshwright.prove.stage_placement import Stages


class _Parts(nn.Module):
    """A model's parts, each fed with what the one before gives."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor, *told: Any) -> Tensor:
        for part in self.parts:
            x = part(x, *told)
        return x


def stage_gradients(
    config: RunConfig, stages: Stages | None, weights: dict[str, Tensor], samples: Reference, indices: list[int]
) -> dict[str, Tensor]:
    """By key, [stage, *shape]; of parameters that are trained and on several stages.

    Args:
        config: of the run.
        stages: that the model is divided into.
        weights: the whole model's, which it starts from.
        samples: of the run.
        indices: the samples of the batch.
    """
    if stages is None or not any(len(parameter.sites) > 1 for parameter in stages.shared):
        return {}
    scale = 1.0 / config.train.global_batch
    parts = [_part(config, stages, stage, weights) for stage in range(len(stages.ranks))]
    for _, handle in (one for part in parts for one in auxiliary_losses(part)):
        handle.scale = scale
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


def _part(config: RunConfig, stages: Stages, stage: int, weights: dict[str, Tensor]) -> nn.Module:
    part = Part(stages.layers[stage], stage=stage, num_stages=len(stages.ranks))
    model = build_part(config.family, run_facts(config), dtype=DTYPE, part=part)
    model.to_empty(device="cpu")
    tie_parameters(model, model_facts(config))
    keys = {name: one.key for one in stages.shared for at, name in one.sites if at == stage}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[keys.get(name, name)])
    return model
