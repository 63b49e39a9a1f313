"""Reference of a proof: a plain module in one process, without any distributed code.

Must not import `parallel`, `pipeline`, `mesh` or the training step, or the code under proof would be compared with
itself. Each step is evaluated at the weights that the layout held before it, so that errors of earlier steps are not
seen again: if all weights start right, and all gradients and updates are right given the weights, all steps are.

A step takes the global batch as one micro-batch, keyed by the numbers of its samples, whatever the layout's
micro-batches. Contributions of these, of stages and of context-parallel ranks' tokens are computed only to explain a
wrong gradient.

A context-parallel rank's gradient of a weight, before it is reduced, is that of the weight's *uses* on the rank's
tokens, not that of the rank's loss: keys and values are used by queries of other ranks. So each module's weights get
the gradient of the module's output at these tokens only.

The module may be on a GPU, as that of a layout on GPUs. What it is given, and all that is returned, is on the CPU.

Shapes: b batch, t tokens, s tokens of a rank, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from meshwright.config.facts_for_family import model_facts, run_facts
from meshwright.config.schema import RunConfig
from meshwright.features.contract import InReference
from meshwright.models.contract.build_module import build_part, tie_parameters
from meshwright.models.contract.family import Family, RunFacts, TrainingData
from meshwright.models.contract.model_facts import Computed, Constant, Part, Stored, Uniform
from meshwright.models.contract.task import Reference, SimpleBatch, Task
from meshwright.nn.attention.mask_spec import TokenLayout
from meshwright.nn.attention.positions import shard_indices
from meshwright.nn.experts.layer import Experts, MixtureOfExperts
from meshwright.nn.experts.router import BatchCounts, ExpertLoad
from meshwright.nn.step_handles import auxiliary_losses, handles, step_buffers
from meshwright.nn.weight_init import normal_shard, uniform_shard
from meshwright.optim.role import Role
from meshwright.prove.placement import ContextPlacement, StagePlacement
from meshwright.prove.record.definitions import use_definitions
from meshwright.prove.record.evidence import DTYPE

TensorsByName = dict[str, Tensor]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class StepReference:
    """Values of a step at the layout's weights."""

    loss: float
    gradients: TensorsByName
    """Full gradients of trained parameters, before clipping."""
    buffers: TensorsByName
    """Full saved buffers after the step."""


@dataclass(frozen=True)
class Contributions:
    """Losses and gradients of one step by data-parallel rank and micro-batch; their sums are those of the step."""

    losses: Tensor
    """[data_parallel, num_microbatches]"""
    gradients: TensorsByName
    """Per parameter, [data_parallel, num_microbatches, *shape]."""
    counts: TensorsByName
    """Per buffer that counts tokens of experts, [data_parallel, num_microbatches, expert]."""


class PlainModel:
    """The plain module of a configuration, evaluated at given weights."""

    def __init__(self, config: RunConfig, data: TrainingData, device: torch.device = CPU) -> None:
        """Build the module.

        Args:
            config: configuration returned by `as_proof` or `as_configured`.
            data: training data.
            device: device that the module computes on.
        """
        self.config, self.device, self._data = config, device, data
        self.module = build_reference(config, device)
        self.samples: Reference = config.family.reference(run_facts(config), data)
        self.initial: TensorsByName = dict(_copies(saved_tensors(self.module)))
        """Parameters and saved buffers before the first step."""
        self.features: list[InReference] = []
        """Features that the module computes with, for which a step is evaluated by the layout's micro-batches."""

    def add_features(self, features: Iterable[InReference]) -> None:
        """Let the module compute with features."""
        self.features = list(features)
        for feature in self.features:
            feature.apply(self.module)

    @cached_property
    def roles(self) -> dict[str, Role]:
        """Roles of the trained parameters."""
        roles = {name: parameter.role for name, parameter in model_facts(self.config).named_parameters()}
        return {name: roles[name] for name in trained_parameters(self.module)}

    @cached_property
    def bias_rates(self) -> dict[str, float]:
        """Per counting buffer of a layer with a balancing bias: the step by which the bias changes."""
        loads = _loads(self.module).items()
        return {f"{name}.value": load.bias_rate for name, load in loads if load.bias is not None}

    def batch(self, step: int) -> list[int]:
        """Return the samples of a step's global batch, in order."""
        size = self.config.train.global_batch
        return list(range((step - 1) * size, step * size))

    def step(self, step: int, weights: Mapping[str, Tensor]) -> StepReference:
        """Evaluate a step at full weights and saved buffers."""
        if self.features:
            cells = self.contributions(step, weights)
        else:
            set_weights(self.module, weights)
            cells = forward_backward(self.module, self.config, self.samples, [self.batch(step)])
        for feature in self.features:
            feature.end(step)
        for _, buffer in step_buffers(self.module):
            buffer.commit(buffer.pending())
        buffers = {name for name, _ in self.module.named_buffers()}
        after = dict(_copies((name, tensor) for name, tensor in saved_tensors(self.module) if name in buffers))
        return StepReference(float(cells.losses.sum()), {n: g.sum((0, 1)) for n, g in cells.gradients.items()}, after)

    def contributions(self, step: int, weights: Mapping[str, Tensor]) -> Contributions:
        """Evaluate a step by micro-batches of data-parallel ranks."""
        set_weights(self.module, weights)
        for feature in self.features:
            feature.begin(step)
        cells = cells_of(self.config, self.batch(step))
        return forward_backward(self.module, self.config, self.samples, cells, self.config.train.num_microbatches)

    def units(self, step: int) -> Tensor:
        """Return the numbers of loss units of each micro-batch, [data_parallel, num_microbatches]."""
        counts = [self._task.count(range(cell[0], cell[-1] + 1)) for cell in cells_of(self.config, self.batch(step))]
        return torch.tensor(counts, dtype=DTYPE).view(-1, self.config.train.num_microbatches)

    @cached_property
    def _task(self) -> Task:
        return self.config.family.task(run_facts(self.config), self._data, CPU)

    def by_stage(self, step: int, weights: Mapping[str, Tensor], stages: StagePlacement) -> TensorsByName:
        """Return each stage's contribution to the gradient of each shared parameter: by key, [stage, *shape]."""
        shared = stage_gradients(self.config, stages, weights, self.samples, self.batch(step), self.device)
        return {name: parts for name, parts in shared.items() if name in self.roles}


def build_reference(config: RunConfig, device: torch.device = CPU) -> nn.Module:
    """Return the plain model on a device, computing by the definitions, with its initial weights."""
    f, facts = run_facts(config), model_facts(config)
    model = build_part(config.family, f, dtype=DTYPE)
    model.to_empty(device=device)
    tie_parameters(model, facts)
    fill_tensors((*model.named_parameters(), *model.named_buffers()), config.family, f)
    frozen = {name for name, parameter in facts.named_parameters() if parameter.frozen}
    for name, parameter in model.named_parameters():
        is_frozen = name in frozen or any(fnmatchcase(name, glob) for glob in config.train.freeze)
        parameter.requires_grad_(not is_frozen)
    use_definitions(model)
    compute_there(model, device)
    return model


def compute_there(model: nn.Module, device: torch.device) -> None:
    """Let a model take arguments from the CPU to its device, and its result back."""
    if device.type == "cpu":
        return

    def there(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    def take(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(there, args)), {name: there(value) for name, value in named.items()}

    model.register_forward_pre_hook(take, with_kwargs=True)
    model.register_forward_hook(lambda _, __, out: out.cpu())


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def saved_tensors(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Yield parameters and saved buffers by name, tied ones once."""
    saved = model.state_dict()
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if name in saved:
            yield name, tensor.detach()


def _copies(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor.to("cpu", DTYPE, copy=True)) for name, tensor in tensors)


@torch.no_grad()
def set_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give parameters and saved buffers their values."""
    for name, tensor in saved_tensors(model):
        tensor.copy_(weights[name])


def _loads(model: nn.Module) -> dict[str, ExpertLoad]:
    return {name: module for name, module in model.named_modules() if isinstance(module, ExpertLoad)}


def forward_backward(
    model: nn.Module,
    config: RunConfig,
    samples: Reference,
    cells: list[list[int]],
    num_microbatches: int = 1,
    scale: float = 1.0,
) -> Contributions:
    """Compute losses and gradients of cells, the samples of each micro-batch of each data-parallel rank.

    The backward is that of the loss times a scale, by which gradients are divided, so that they are rounded otherwise.
    """
    grid = (len(cells) // num_microbatches, num_microbatches)
    names, parameters = zip(*trained_parameters(model).items(), strict=True)
    partial = {name: _zeros(grid, p) for name, p in zip(names, parameters, strict=True)}
    counts = {f"{name}.value": _zeros(grid, load.value) for name, load in _loads(model).items()}
    losses = torch.zeros(grid, dtype=DTYPE)
    prepare_handles(model, config, scale)
    count_over_batch(model, samples, [index for cell in cells for index in cell])
    for cell, inside in enumerate(cells):
        at = divmod(cell, num_microbatches)
        before = {name: load.pending() for name, load in _loads(model).items()}
        loss = samples.loss(model, inside)
        auxiliary = [value for _, handle in auxiliary_losses(model) if (value := handle.take()) is not None]
        losses[at] = loss.detach() + sum(auxiliary) / scale
        gradients = torch.autograd.grad(loss * scale, parameters, allow_unused=True, materialize_grads=True)
        for name, gradient in zip(names, gradients, strict=True):
            partial[name][at] = gradient / scale
        for name, load in _loads(model).items():
            counts[f"{name}.value"][at] = load.pending() - before[name]
    return Contributions(losses, partial, counts)


def _zeros(grid: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.zeros((*grid, *like.shape), dtype=like.dtype)


def prepare_handles(model: nn.Module, config: RunConfig, scale: float = 1.0) -> None:
    """Forget what other forwards contributed to a step, and scale auxiliary losses by the global batch."""
    for _, handle in handles(model):
        handle.discard()
    for _, loss in auxiliary_losses(model):
        loss.scale = scale / config.train.global_batch


def cells_of(config: RunConfig, indices: list[int]) -> list[list[int]]:
    """Return the samples of each micro-batch of each data-parallel rank."""
    num_cells = config.mesh.axes().data_parallel() * config.train.num_microbatches
    size = len(indices) // num_cells
    return [indices[at * size : (at + 1) * size] for at in range(num_cells)]


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
    config: RunConfig, stages: StagePlacement, weights: Mapping[str, Tensor], samples: Reference, indices: list[int],
    device: torch.device = CPU,
) -> dict[str, Tensor]:  # fmt: skip
    """Compute each stage's contribution to the gradient of each shared parameter: by key, [stage, *shape].

    Args:
        config: configuration of the run.
        stages: stages that the model is split into.
        weights: weights of the full model.
        samples: reference loss on the run's data.
        indices: sample indices of the batch.
        device: device to compute on.
    """
    if not any(len(parameter.sites) > 1 for parameter in stages.shared):
        return {}
    scale = 1.0 / config.train.global_batch
    parts = [_build_stage(config, stages, stage, weights, device) for stage in range(len(stages.ranks))]
    for _, handle in (parameter for part in parts for parameter in auxiliary_losses(part)):
        handle.scale = scale
    copies = [
        (parameter.key, stage, parts[stage].get_parameter(name))
        for parameter in stages.shared
        for stage, name in parameter.sites
        if parts[stage].get_parameter(name).requires_grad
    ]
    model = _StageSequence(config.family, parts)
    compute_there(model, device)
    loss = samples.loss(model, indices)
    found = torch.autograd.grad(loss, [copy for *_, copy in copies], allow_unused=True, materialize_grads=True)
    result: dict[str, Tensor] = {}
    for (key, stage, copy), gradient in zip(copies, found, strict=True):
        result.setdefault(key, _zeros((len(parts),), copy))[stage] = gradient
    return result


def _build_stage(
    config: RunConfig, stages: StagePlacement, stage: int, weights: Mapping[str, Tensor], device: torch.device
) -> nn.Module:
    part = Part(stages.layers[stage], stage=stage, num_stages=len(stages.ranks))
    model = build_part(config.family, run_facts(config), dtype=DTYPE, part=part)
    model.to_empty(device=device)
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


def token_contributions(
    plain: PlainModel, data: TrainingData, placement: ContextPlacement, step: int, weights: Mapping[str, Tensor]
) -> tuple[TensorsByName, Tensor]:
    """Compute the contributions of each data-parallel and context-parallel rank to a step.

    Weights that are not used token by token get contributions that don't sum to the gradient.

    Returns:
        By parameter, [data_parallel × cp, num_microbatches, *shape]; and of losses, [data_parallel × cp,
        num_microbatches].
    """
    config, model = plain.config, plain.module
    train, mesh, batch = config.train, config.mesh.axes(), plain.batch(step)
    task = config.family.task(run_facts(config), data, CPU)
    num_units = task.count(range(batch[0], batch[-1] + 1))
    set_weights(model, weights)
    prepare_handles(model, config)
    count_over_batch(model, plain.samples, batch)
    grid = (mesh.data_parallel(), mesh.cp, train.num_microbatches)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parts = {name: _zeros(grid, p) for name, p in trained.items()}
    losses = torch.zeros(grid, dtype=DTYPE)
    for cell, indices in enumerate(cells_of(config, batch)):
        rank, microbatch = divmod(cell, train.num_microbatches)
        inside = task.batch(range(indices[0], indices[-1] + 1))
        layout = next(one for one in inside.conditions if isinstance(one, TokenLayout))
        tokens_Rbs = torch.stack([_rows(shard_indices(shard)) for shard in placement.shards(layout.documents)])
        with _recorded_uses(model) as uses:
            out = config.family.run(model, inside.inputs, inside)
            torch.autograd.backward(task.loss_sum(out, inside.targets) / num_units)
        model.zero_grad(set_to_none=True)
        row = torch.arange(len(out))[:, None]
        for cp, tokens_bs in enumerate(tokens_Rbs):
            at = (row, tokens_bs.expand(len(out), -1))
            losses[rank, cp, microbatch] = task.loss_sum(out.detach()[at], inside.targets[at]) / num_units
        rank_bt = tokens_Rbs.transpose(0, 1).flatten(1).argsort(-1) // tokens_Rbs.shape[2]
        for name, parameter in trained.items():
            parts[name][rank, :, microbatch] = _by_rank(uses, parameter, rank_bt.to(plain.device), mesh.cp).cpu()
    return {name: value.flatten(0, 1) for name, value in parts.items()}, losses.flatten(0, 1)


def chunk_contributions(
    plain: PlainModel, data: TrainingData, size: int, step: int, weights: Mapping[str, Tensor]
) -> TensorsByName:
    """Compute what the losses of chunks of `size` tokens contribute to a step, summed over all micro-batches: by
    parameter, [chunk, *shape]."""
    config, model, batch = plain.config, plain.module, plain.batch(step)
    task = config.family.task(run_facts(config), data, CPU)
    num_units = task.count(range(batch[0], batch[-1] + 1))
    set_weights(model, weights)
    prepare_handles(model, config)
    count_over_batch(model, plain.samples, batch)
    names, parameters = zip(*trained_parameters(model).items(), strict=True)
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    for cell in cells_of(config, batch):
        inside = task.batch(range(cell[0], cell[-1] + 1))
        out = config.family.run(model, inside.inputs, inside).flatten(0, 1)
        pairs = zip(torch.split(out, size), torch.split(inside.targets.flatten(), size), strict=True)
        for number, (logits, targets) in enumerate(pairs):
            loss = task.loss_sum(logits[None], targets[None]) / num_units
            parts = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
            for name, part in zip(names, parts, strict=True):
                if number == len(found[name]):
                    found[name].append(_zeros((), part))
                found[name][number] += part.cpu()
    return {name: torch.stack(parts) for name, parts in found.items()}


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x[None]


@dataclass
class _Use:
    """One forward of a module."""

    module: nn.Module
    parameters: list[nn.Parameter]
    """Parameters whose gradient is found from this module's output."""
    inputs: tuple[object, ...]
    gradients: list[Tensor] = field(default_factory=list)
    """Gradients of the output, in parts that add up."""


@contextmanager
def _recorded_uses(model: nn.Module) -> Iterator[list[_Use]]:
    """Record all forwards and backwards of the modules that own parameters, within the context."""
    uses: list[_Use] = []

    def record(owned: list[nn.Parameter], module: nn.Module, inputs: tuple[object, ...], out: object) -> None:
        if inputs and isinstance(out, Tensor) and out.requires_grad:  # others, such as attention, mix tokens
            uses.append(_Use(module, owned, tuple(x.detach() if isinstance(x, Tensor) else x for x in inputs)))
            out.register_hook(uses[-1].gradients.append)  # type: ignore[no-untyped-call]

    handles: list[RemovableHandle] = [
        module.register_forward_hook(partial(record, owned)) for module, owned in _owners(model)
    ]
    try:
        yield uses
    finally:
        for handle in handles:
            handle.remove()


def _owners(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Yield each module with the parameters that map its tokens one by one: its own, or those of its experts.

    Rows of experts are in another order than tokens.
    """
    for module in model.modules():
        owned = list(module.parameters(recurse=False))
        if isinstance(module, MixtureOfExperts):
            owned += module.experts.parameters()
        if owned and not isinstance(module, Experts):
            yield module, owned


def _by_rank(uses: list[_Use], parameter: nn.Parameter, rank_bt: Tensor, num_ranks: int) -> Tensor:
    """Return the gradient [rank, …] of a parameter's uses on the tokens of each rank."""
    total = parameter.new_zeros(num_ranks, *parameter.shape)
    for use in uses:
        if not use.gradients or all(parameter is not one for one in use.parameters):
            continue
        gradient = torch.stack(use.gradients).sum(0)
        if gradient.shape[1:2] != rank_bt.shape[1:2]:
            continue
        out = use.module(*use.inputs)
        for rank in range(num_ranks):
            mask = (rank_bt == rank).reshape(*rank_bt.shape, *[1] * (gradient.dim() - 2))
            [found] = torch.autograd.grad(out, [parameter], gradient * mask, retain_graph=True, allow_unused=True)
            if found is not None:
                total[rank] += found
    return total
