"""The reference of a proof: one process, a plain module, a plain loop, and none of the distributed code.

Nothing here may come from `parallel`, `pipeline`, `mesh` or the training step: what is proved must not be compared
with itself. Samples are read one by one, gradients are added up cell by cell, AdamW is written out as in the paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain

import torch
from torch import Tensor, nn

from meshwright.config.facts_for_family import model_facts, run_facts
from meshwright.config.schema import RunConfig
from meshwright.models.contract.build_module import build_part, tie_parameters
from meshwright.models.contract.family import TrainingData
from meshwright.models.contract.initial_values import Computed, Constant
from meshwright.models.contract.task import Reference
from meshwright.nn.step_handles import auxiliary_losses, step_buffers
from meshwright.nn.weight_init import normal_piece
from meshwright.prove.record.evidence import DTYPE, ReferenceEvidence
from meshwright.prove.record.reference_by_stage import stage_gradients
from meshwright.prove.stage_placement import Stages
from meshwright.train.lr_schedule import learning_rate

ByName = dict[str, Tensor]


@dataclass(frozen=True)
class _Batch:
    """One step's losses and gradients, cell by cell."""

    partial_losses: Tensor
    """[data_parallel, num_microbatches]"""
    partial_gradients: ByName
    """Per parameter, [data_parallel, num_microbatches, *shape]."""


def compute_reference(
    config: RunConfig, data: TrainingData, *, num_steps: int, stages: Stages | None = None
) -> ReferenceEvidence:
    """Train `num_steps` steps as `config` says, in float64, and keep what a proof compares with.

    Args:
        config: of the run, as it is proved.
        data: what it trains on.
        num_steps: at least one.
        stages: of the layout, to say which stage's part of a shared gradient is wrong; no proof rests on them.
    """
    train = config.train
    model, samples_of = _build(config), config.family.reference(run_facts(config), data)
    initial = _values(model)
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in _trained(model).items()}
    by_stage = stage_gradients(config, stages, initial, samples_of, list(range(train.global_batch)))
    for _, handle in auxiliary_losses(model):
        handle.scale = 1.0 / train.global_batch
    losses, norms, samples = [], [], []
    first: _Batch | None = None
    after_first: ByName = {}
    for step in range(1, num_steps + 1):
        indices = list(range((step - 1) * train.global_batch, step * train.global_batch))
        batch = _forward_backward(model, config, samples_of, indices)
        first = first or batch
        gradients = {name: partial.sum((0, 1)) for name, partial in batch.partial_gradients.items()}
        norm = math.sqrt(sum(float((g * g).sum()) for g in gradients.values()))
        _adamw(model, gradients, moments, config, step=step, clip=min(1.0, train.max_grad_norm / norm))
        for _, buffer in step_buffers(model):
            buffer.commit(buffer.pending())
        after_first = after_first or _values(model)
        losses.append(float(batch.partial_losses.sum()))
        norms.append(norm)
        samples.append(indices)
    assert first is not None, "a proof has at least one step"
    return ReferenceEvidence(
        losses=losses,
        grad_norms=norms,
        samples=samples,
        gradients={name: partial.sum((0, 1)) for name, partial in first.partial_gradients.items()},
        partial_gradients=first.partial_gradients,
        parameters=_values(model),
        initial=initial,
        partial_losses=first.partial_losses,
        after_first=after_first,
        stage_gradients={name: parts for name, parts in by_stage.items() if name in moments},
    )


def _build(config: RunConfig) -> nn.Module:
    f, facts = run_facts(config), model_facts(config)
    model = build_part(config.family, f, dtype=DTYPE)
    model.to_empty(device="cpu")
    tie_parameters(model, facts)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            fill = config.family.initial(f, name)
            if isinstance(fill, Constant):
                tensor.fill_(fill.value)
            elif isinstance(fill, Computed):
                tensor.copy_(fill.compute())
            else:
                tensor.copy_(normal_piece(config.train.seed, name, tensor.shape, std=fill.std))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(fnmatchcase(name, glob) for glob in config.train.freeze))
    return model


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _values(model: nn.Module) -> ByName:
    """Parameters and saved buffers."""
    saved = model.state_dict()
    tensors = chain(model.named_parameters(), model.named_buffers())  # of what is tied once
    return {name: tensor.detach().to(DTYPE, copy=True) for name, tensor in tensors if name in saved}


def _forward_backward(model: nn.Module, config: RunConfig, samples: Reference, indices: list[int]) -> _Batch:
    """Losses and gradients of a batch, for each share of it and each micro-batch apart."""
    train, axes = config.train, config.mesh.axes()
    cells = (axes.data_parallel(), train.num_microbatches)
    per_cell = train.global_batch // math.prod(cells)
    names, parameters = zip(*_trained(model).items(), strict=True)
    partial = {name: p.new_zeros((*cells, *p.shape)) for name, p in zip(names, parameters, strict=True)}
    losses = torch.zeros(cells, dtype=DTYPE)
    for cell in range(math.prod(cells)):
        share, microbatch = divmod(cell, train.num_microbatches)
        loss = samples.loss(model, indices[cell * per_cell : (cell + 1) * per_cell])
        auxiliary = [value for _, handle in auxiliary_losses(model) if (value := handle.take()) is not None]
        losses[share, microbatch] = loss.detach() + sum(auxiliary)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        for name, gradient in zip(names, gradients, strict=True):
            partial[name][share, microbatch] = gradient
    return _Batch(losses, partial)


@torch.no_grad()
def _adamw(
    model: nn.Module,
    gradients: ByName,
    moments: dict[str, tuple[Tensor, Tensor]],
    config: RunConfig,
    *,
    step: int,
    clip: float,
) -> None:
    """One step of AdamW (Loshchilov and Hutter 2019, algorithm 2), with clipped gradients."""
    train = config.train
    lr = learning_rate(step, train)
    for name, p in _trained(model).items():
        g, (first, second) = gradients[name] * clip, moments[name]
        first.mul_(train.beta1).add_((1 - train.beta1) * g)
        second.mul_(train.beta2).add_((1 - train.beta2) * g * g)
        if p.dim() >= 2:
            p.mul_(1 - lr * train.weight_decay)
        mean, variance = first / (1 - train.beta1**step), second / (1 - train.beta2**step)
        p.sub_(lr * mean / (variance.sqrt() + train.eps))
