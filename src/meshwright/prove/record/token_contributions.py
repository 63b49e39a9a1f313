"""Gradient contributions of the tokens of each context-parallel rank, computed in one process.

A context-parallel rank's gradient of a weight, before it is reduced, is that of the weight's *uses* on the rank's
tokens, not that of the rank's loss: keys and values are used by queries of other ranks. So each module's weights get
the gradient of the module's output at these tokens only.

Used only to name a fault after a proof has failed. Shapes: b batch, t tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from meshwright.config.schema import RunConfig
from meshwright.models.contract.family import TrainingData
from meshwright.nn.experts.layer import Experts, MixtureOfExperts
from meshwright.nn.step_handles import auxiliary_losses
from meshwright.prove.placement import ContextPlacement
from meshwright.prove.record.evidence import ContextEvidence
from meshwright.prove.record.reference_run import build_reference, cells, count_over_batch
from meshwright.prove.record.token_reference import TokenReference
from meshwright.prove.record.token_table import TokenTable


def token_contributions(config: RunConfig, data: TrainingData, placement: ContextPlacement) -> ContextEvidence:
    """Compute the contributions of each data-parallel and context-parallel rank to the gradients of step 1.

    Weights that are not used token by token get contributions that don't sum to the gradient.
    """
    train, mesh = config.train, config.mesh.axes()
    model = build_reference(config)
    samples = TokenReference(config, data, placement)
    for _, handle in auxiliary_losses(model):
        handle.scale = 1.0 / train.global_batch
    count_over_batch(model, samples, list(range(train.global_batch)))
    grid = (mesh.data_parallel(), mesh.cp, train.num_microbatches)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parts = {name: p.new_zeros(*grid, *p.shape) for name, p in trained.items()}
    losses = torch.zeros(grid, dtype=torch.float64)
    for cell, indices in enumerate(cells(config, list(range(train.global_batch)))):
        rank, microbatch = divmod(cell, train.num_microbatches)
        with _recorded_uses(model) as uses:
            losses[rank, :, microbatch] = _backward(model, samples, indices)
        _, table = samples.batch(indices)
        for name, parameter in trained.items():
            parts[name][rank, :, microbatch] = _by_rank(uses, parameter, table)
    return ContextEvidence(
        {name: value.flatten(0, 1) for name, value in parts.items()}, partial_losses=losses.flatten(0, 1)
    )


def _backward(model: nn.Module, samples: TokenReference, indices: list[int]) -> Tensor:
    """Run a micro-batch forward and backward, and return the losses [rank] of the ranks' tokens."""
    batch, table = samples.batch(indices)
    num_units = samples.num_units(indices)
    out = samples.family.run(model, batch.inputs, batch)
    torch.autograd.backward(samples.task.loss_sum(out, batch.targets) / num_units)
    found = []
    for tokens_bs in table.tokens_Rbs:
        row = torch.arange(len(out))[:, None]
        tokens_bs = tokens_bs.expand(len(out), -1)
        found.append(samples.task.loss_sum(out.detach()[row, tokens_bs], batch.targets[row, tokens_bs]) / num_units)
    model.zero_grad(set_to_none=True)
    return torch.stack(found)


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

    def record(owned: list[nn.Parameter], module: nn.Module, inputs: tuple[object, ...], out: Tensor) -> None:
        if out.requires_grad:
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


def _by_rank(uses: list[_Use], parameter: nn.Parameter, table: TokenTable) -> Tensor:
    """Return the gradient [rank, …] of a parameter's uses on the tokens of each rank."""
    total = parameter.new_zeros(table.num_ranks, *parameter.shape)
    for use in uses:
        if not use.gradients or all(parameter is not one for one in use.parameters):
            continue
        gradient = torch.stack(use.gradients).sum(0)
        if gradient.shape[1:2] != table.rank_bt.shape[1:2]:
            continue
        out = use.module(*use.inputs)
        for rank in range(table.num_ranks):
            mask = (table.rank_bt == rank).reshape(*table.rank_bt.shape, *[1] * (gradient.dim() - 2))
            [found] = torch.autograd.grad(out, [parameter], gradient * mask, retain_graph=True, allow_unused=True)
            if found is not None:
                total[rank] += found
    return total
