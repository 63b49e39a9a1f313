"""Reference of a proof: a plain module and training loop in one process, without any distributed code.

Must not import `parallel`, `pipeline`, `mesh` or the training step, or the code under proof would be compared with
itself. Gradients are computed per micro-batch of each data-parallel rank; AdamW is implemented as in the paper.
Gradients by stage are used only to diagnose which stages contribute to a wrong gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.config.facts_for_family import model_facts, run_facts
from meshwright.config.schema import RunConfig
from meshwright.models.contract.build_module import build_part, tie_parameters
from meshwright.models.contract.family import Family, RunFacts, TrainingData
from meshwright.models.contract.model_facts import Computed, Constant, Part, Stored, Uniform
from meshwright.models.contract.task import Reference, SimpleBatch
from meshwright.nn.experts.router import BatchCounts, ExpertLoad
from meshwright.nn.step_handles import auxiliary_losses, step_buffers
from meshwright.nn.weight_init import normal_shard, uniform_shard
from meshwright.prove.placement import StagePlacement
from meshwright.prove.record.evidence import DTYPE, ReferenceEvidence
from meshwright.prove.record.plain_optimizer import RIGHT, PlainOptimizer
from meshwright.prove.record.plain_updates import States
from meshwright.prove.record.recording_task import sample_contents
from meshwright.prove.spec import clip_limit

TensorsByName = dict[str, Tensor]


@dataclass(frozen=True)
class BatchGradients:
    """Losses and gradients of one step, per data-parallel rank and micro-batch."""

    partial_losses: Tensor
    """[data_parallel, num_microbatches]"""
    partial_gradients: TensorsByName
    """Per parameter, [data_parallel, num_microbatches, *shape]."""
    partial_counts: TensorsByName
    """Per buffer that counts tokens of experts, [data_parallel, num_microbatches, expert]."""

    def gradients(self) -> TensorsByName:
        """Return the gradients of the whole batch."""
        return {name: partial.sum((0, 1)) for name, partial in self.partial_gradients.items()}


def compute_reference(
    config: RunConfig,
    data: TrainingData,
    *,
    num_steps: int,
    stages: StagePlacement | None = None,
    change: Callable[[nn.Module], None] | None = None,
    ranks_a_cell: int = 1,
    samples_of: Reference | None = None,
    optimizer: PlainOptimizer = RIGHT,
    weights_late: int = 0,
) -> ReferenceEvidence:
    """Train for `num_steps` steps in float64 and return the reference values.

    Args:
        config: configuration returned by `as_proof`.
        data: training data.
        num_steps: number of steps, at least one.
        stages: the layout's stage placement, used only to diagnose gradients of shared parameters.
        change: called on the model before the first step; used only for variants with a known fault.
        ranks_a_cell: consecutive data-parallel ranks whose samples run as one micro-batch; more than 1 for variants.
        samples_of: loss of samples; another than the family's reference for variants only.
        optimizer: another than the right one for variants only.
        weights_late: steps by which the weights of forward and backward are late, for variants only.
    """
    size = config.train.global_batch
    model, samples_of = build_reference(config), samples_of or config.family.reference(run_facts(config), data)
    if change is not None:
        change(model)
    initial, batches = _values(model), [list(range(at, at + size)) for at in range(0, num_steps * size, size)]
    by_stage = stage_gradients(config, stages, initial, samples_of, batches[0])
    for _, handle in auxiliary_losses(model):
        handle.scale = 1.0 / size
    training, losses, after_first = _Training(model, config, optimizer, num_steps), list[float](), TensorsByName()
    first: BatchGradients | None = None
    versions: list[TensorsByName] = []
    for indices in batches:
        with _late_weights(model, versions, weights_late):
            batch = forward_backward(model, config, samples_of, indices, ranks_a_cell)
        first = first or batch
        training.update(batch)
        after_first = after_first or _values(model)
        losses.append(float(batch.partial_losses.sum()))
    assert first is not None, "a proof has at least one step"
    return ReferenceEvidence(
        losses=losses,
        grad_norms=training.norms,
        samples=batches,
        gradients=first.gradients(),
        partial_gradients=first.partial_gradients,
        parameters=_values(model),
        initial=initial,
        partial_losses=first.partial_losses,
        after_first=after_first,
        stage_gradients={name: parts for name, parts in by_stage.items() if name in training.trained},
        partial_counts=first.partial_counts,
        contents=sample_contents(samples_of, num_steps * size),
        bias_rates={f"{name}.value": load.bias_rate for name, load in _loads(model).items() if load.bias is not None},
    )


class _Training:
    """Updates of a reference, step by step."""

    def __init__(self, model: nn.Module, config: RunConfig, optimizer: PlainOptimizer, num_steps: int) -> None:
        self._model, self._config, self._optimizer, self._num_steps = model, config, optimizer, num_steps
        self.trained = trained_parameters(model)
        self.norms: list[float] = []
        self._states: States = {}
        roles = {name: parameter.role for name, parameter in model_facts(config).named_parameters()}
        self._roles = {name: (p, roles[name]) for name, p in self.trained.items()}
        self._kept: TensorsByName = {}
        """Clipped gradients of the step before, if a fault doesn't clear them."""

    def update(self, batch: BatchGradients) -> None:
        """Apply the gradients of the next step to the parameters, and its counts to the buffers."""
        step = len(self.norms) + 1
        gradients = {name: gradient + self._kept.get(name, 0.0) for name, gradient in batch.gradients().items()}
        norm = math.sqrt(sum(float((g * g).sum()) for g in gradients.values()))
        limit = clip_limit(self._config, self.norms, step=step, num_steps=self._num_steps)
        train, optimizer = self._config.train, self._optimizer
        optimizer.step(self._roles, gradients, self._states, train, step=step, limit=limit)
        if optimizer.sums_gradients:
            self._kept = {name: g * min(1.0, limit / norm) for name, g in gradients.items()}
        for _, buffer in step_buffers(self._model):
            buffer.commit(buffer.pending())
        self.norms.append(norm)


def build_reference(config: RunConfig) -> nn.Module:
    """Return the plain model with its initial weights."""
    f, facts = run_facts(config), model_facts(config)
    model = build_part(config.family, f, dtype=DTYPE)
    model.to_empty(device="cpu")
    tie_parameters(model, facts)
    fill_tensors((*model.named_parameters(), *model.named_buffers()), config.family, f)
    frozen = {name for name, parameter in facts.named_parameters() if parameter.frozen}
    for name, parameter in model.named_parameters():
        is_frozen = name in frozen or any(fnmatchcase(name, glob) for glob in config.train.freeze)
        parameter.requires_grad_(not is_frozen)
    return model


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _values(model: nn.Module) -> TensorsByName:
    """Copy the parameters and saved buffers."""
    saved = model.state_dict()
    tensors = chain(model.named_parameters(), model.named_buffers())  # yields tied parameters once
    return {name: tensor.detach().to(DTYPE, copy=True) for name, tensor in tensors if name in saved}


@contextmanager
def _late_weights(model: nn.Module, versions: list[TensorsByName], late: int) -> Iterator[None]:
    """Let the model have its values of `late` steps before; `versions` are those so far."""
    if late:
        versions.append(_values(model))
        _set_values(model, versions[max(0, len(versions) - 1 - late)])
    yield
    if late:
        _set_values(model, versions[-1])


@torch.no_grad()
def _set_values(model: nn.Module, values: TensorsByName) -> None:
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if name in values:
            tensor.copy_(values[name])


def _loads(model: nn.Module) -> dict[str, ExpertLoad]:
    return {name: module for name, module in model.named_modules() if isinstance(module, ExpertLoad)}


def forward_backward(
    model: nn.Module, config: RunConfig, samples: Reference, indices: list[int], ranks_a_cell: int = 1
) -> BatchGradients:
    """Compute losses and gradients per data-parallel rank and micro-batch."""
    grid = (config.mesh.axes().data_parallel() // ranks_a_cell, config.train.num_microbatches)
    names, parameters = zip(*trained_parameters(model).items(), strict=True)
    partial = {name: p.new_zeros((*grid, *p.shape)) for name, p in zip(names, parameters, strict=True)}
    counts = {f"{name}.value": load.value.new_zeros((*grid, *load.value.shape)) for name, load in _loads(model).items()}
    losses = torch.zeros(grid, dtype=DTYPE)
    count_over_batch(model, samples, indices)
    for cell, inside in enumerate(cells(config, indices, ranks_a_cell)):
        at = divmod(cell, config.train.num_microbatches)
        before = {name: load.pending() for name, load in _loads(model).items()}
        loss = samples.loss(model, inside)
        auxiliary = [value for _, handle in auxiliary_losses(model) if (value := handle.take()) is not None]
        losses[at] = loss.detach() + sum(auxiliary)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        for name, gradient in zip(names, gradients, strict=True):
            partial[name][at] = gradient
        for name, load in _loads(model).items():
            counts[f"{name}.value"][at] = load.pending() - before[name]
    return BatchGradients(losses, partial, counts)


def cells(config: RunConfig, indices: list[int], ranks_a_cell: int = 1) -> list[list[int]]:
    """Return the samples of each micro-batch of each data-parallel rank, or of so many consecutive ranks together."""
    num_microbatches = config.train.num_microbatches
    size = len(indices) // (config.mesh.axes().data_parallel() * num_microbatches)
    by_rank = [indices[at : at + size * num_microbatches] for at in range(0, len(indices), size * num_microbatches)]
    return [
        [sample for rank in by_rank[first : first + ranks_a_cell] for sample in rank[m * size : (m + 1) * size]]
        for first in range(0, len(by_rank), ranks_a_cell)
        for m in range(num_microbatches)
    ]


@torch.no_grad()
def count_over_batch(model: nn.Module, samples: Reference, indices: list[int]) -> None:
    """Give each router the counts of the global batch, from a forward of all samples, whatever the layout's cells."""
    routers = [handle for handle in model.modules() if isinstance(handle, BatchCounts)]
    totals: dict[BatchCounts, Tensor] = {}
    for router in routers:
        router.reduce = lambda counts, router=router: totals.setdefault(router, counts)  # type: ignore[misc]
    if routers:
        samples.loss(model, indices)
    for router in routers:
        router.reduce = lambda counts, router=router: totals[router]  # type: ignore[misc]


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


@torch.no_grad()
def fill_tensors(tensors: Iterable[tuple[str, Tensor]], family: Family, f: RunFacts) -> None:
    """Give each parameter or buffer the initial values of its name in the full model, not as ranks fill shards."""
    for name, tensor in tensors:
        fill = family.initial(f, name)
        if isinstance(fill, Constant):
            tensor.fill_(fill.value)
        elif isinstance(fill, Computed):
            tensor.copy_(fill.compute())
        elif isinstance(fill, Stored):
            tensor.copy_(fill.read(None))
        elif isinstance(fill, Uniform):
            tensor.copy_(uniform_shard(f.seed, name, tensor.shape, bound=fill.bound))
        else:
            tensor.copy_(normal_shard(f.seed, name, tensor.shape, std=fill.std))
