"""Per-stage reference gradients of shared parameters.

Splits the model into the layout's stages and runs them sequentially in one process. Used only to diagnose which stages
contribute to a wrong gradient, never to decide whether a proof passes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshwright.config.facts_for_family import model_facts, run_facts
from meshwright.config.schema import RunConfig
from meshwright.models.contract.build_module import build_part, tie_parameters
from meshwright.models.contract.family import Family
from meshwright.models.contract.model_facts import Part
from meshwright.models.contract.task import Reference, SimpleBatch
from meshwright.nn.step_handles import auxiliary_losses
from meshwright.prove.record.evidence import DTYPE
from meshwright.prove.record.initial_tensors import fill_tensors
from meshwright.prove.stage_placement import StagePlacement


class _StageSequence(nn.Module):
    """Stages of a model, applied in sequence."""

    def __init__(self, family: Family, parts: list[nn.Module]) -> None:
        super().__init__()
        self._family, self.parts = family, nn.ModuleList(parts)

    def forward(self, x: Tensor, *inputs: Any) -> Tensor:
        batch = SimpleBatch(x, inputs)
        for part in self.parts:
            x = self._family.run(part, x, batch)
        return x


def stage_gradients(
    config: RunConfig, stages: StagePlacement | None, weights: dict[str, Tensor], samples: Reference, indices: list[int]
) -> dict[str, Tensor]:
    """Compute each stage's contribution to the gradient of each shared parameter: by key, [stage, *shape].

    Args:
        config: configuration of the run.
        stages: stages that the model is split into.
        weights: initial weights of the full model.
        samples: reference loss on the run's data.
        indices: sample indices of the batch.
    """
    if stages is None or not any(len(parameter.sites) > 1 for parameter in stages.shared):
        return {}
    scale = 1.0 / config.train.global_batch
    parts = [_build_stage(config, stages, stage, weights) for stage in range(len(stages.ranks))]
    for _, handle in (parameter for part in parts for parameter in auxiliary_losses(part)):
        handle.scale = scale
    copies = [
        (parameter.key, stage, parts[stage].get_parameter(name))
        for parameter in stages.shared
        for stage, name in parameter.sites
        if parts[stage].get_parameter(name).requires_grad
    ]
    loss = samples.loss(_StageSequence(config.family, parts), indices)
    found = torch.autograd.grad(loss, [copy for *_, copy in copies], allow_unused=True, materialize_grads=True)
    result: dict[str, Tensor] = {}
    for (key, stage, copy), gradient in zip(copies, found, strict=True):
        result.setdefault(key, copy.new_zeros((len(parts), *copy.shape)))[stage] = gradient
    return result


def _build_stage(config: RunConfig, stages: StagePlacement, stage: int, weights: dict[str, Tensor]) -> nn.Module:
    part = Part(stages.layers[stage], stage=stage, num_stages=len(stages.ranks))
    model = build_part(config.family, run_facts(config), dtype=DTYPE, part=part)
    model.to_empty(device="cpu")
    tie_parameters(model, model_facts(config))
    keys = {name: parameter.key for parameter in stages.shared for at, name in parameter.sites if at == stage}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[keys.get(name, name)])
    fill_tensors(model.named_buffers(), config.family, run_facts(config))
    return model
