"""The reference of a proof: one process, a plain module, a plain loop, and none of the distributed code.

Nothing here may come from `parallel`, `pipeline`, `mesh` or the training step: what is proved must not be compared
with itself. Samples are read one by one, gradients are added up cell by cell, AdamW is written out as in the paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from meshwright.config.schema import RunConfig
from meshwright.data.pictures import Pictures
from meshwright.data.text import Corpus
from meshwright.models.build import build_model
from meshwright.models.part import ModelPart
from meshwright.nn.init import normal_piece
from meshwright.prove.evidence import ReferenceEvidence
from meshwright.prove.samples import DTYPE, Samples, open_samples
from meshwright.prove.stage_parts import stage_gradients
from meshwright.train.lr_schedule import learning_rate

ByName = dict[str, Tensor]


@dataclass(frozen=True)
class _Batch:
    """One step's losses and gradients, cell by cell."""

    partial_losses: Tensor
    """[data_parallel, num_microbatches]"""
    partial_gradients: ByName
    """Per parameter, [data_parallel, num_microbatches, *shape]."""


def compute_reference(config: RunConfig, data: Corpus | Pictures, *, num_steps: int) -> ReferenceEvidence:
    """Train `num_steps` steps as `config` says, in float64, and keep what a proof compares with."""
    train = config.train
    model, samples_of = _build(config), open_samples(config, data)
    initial = _values(model)
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in _trained(model).items()}
    by_stage = stage_gradients(config, initial, samples_of, list(range(train.global_batch)))
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


def _build(config: RunConfig) -> ModelPart:
    model = build_model(config.model.spec(), dtype=DTYPE)
    model.to_empty(device="cpu")
    model.tie()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = model.initial_std(name)
            value = torch.ones(()) if std is None else normal_piece(config.train.seed, name, parameter.shape, std=std)
            parameter.copy_(value)
            parameter.requires_grad_(not any(fnmatchcase(name, glob) for glob in config.train.freeze))
    return model


def _trained(model: ModelPart) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _values(model: ModelPart) -> ByName:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _forward_backward(model: ModelPart, config: RunConfig, samples: Samples, indices: list[int]) -> _Batch:
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
        losses[share, microbatch] = loss.detach()
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        for name, gradient in zip(names, gradients, strict=True):
            partial[name][share, microbatch] = gradient
    return _Batch(losses, partial)


@torch.no_grad()
def _adamw(
    model: ModelPart,
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
