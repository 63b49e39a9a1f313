"""Second pass of a failed proof in one process: the values of the plain module's forward in the failing step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.models.contract.family import TrainingData
from meshwright.models.contract.task import Reference
from meshwright.nn.attention.token_indices import shard_indices
from meshwright.nn.attention.token_layout import TokenLayout
from meshwright.prove.context_placement import ContextPlacement
from meshwright.prove.locate.probe import Values, probed
from meshwright.prove.record.reference_run import build_reference, cells, compute_reference, count_over_batch


@dataclass(frozen=True)
class ReferencePass:
    """Values of a step's forward in one process."""

    values: list[Values]
    """Values of each micro-batch of each data-parallel rank, in the order of `cells`. Modules that run several times
    are left out, since the order of their calls may be that of a set, which differs between processes."""
    samples: tuple[tuple[int, ...], ...]
    """Samples of each cell."""
    tokens: dict[int, list[Tensor]]
    """Per cell, the positions [t] or [b, t] of the tokens on each context-parallel rank; empty without any."""
    epsilons: dict[str, float]
    """Epsilon of each norm, by module."""


@torch.no_grad()
def reference_activations(
    config: RunConfig, data: TrainingData, *, step: int, context: ContextPlacement | None
) -> ReferencePass:
    """Run the step's forward in one process.

    The module gets the task's own batches, made here, since a reference may take samples apart: what the ranks' samples
    were is compared before, by content.

    Args:
        config: configuration returned by `as_proof`.
        data: training data.
        step: failing step, from 1; the steps before are trained first.
        context: placement of tokens on context-parallel ranks, if there are any.
    """
    f, train = run_facts(config), config.train
    model, samples_of = build_reference(config), config.family.reference(f, data)
    if step > 1:
        with torch.enable_grad():
            trained = compute_reference(config, data, num_steps=step - 1, samples_of=samples_of).parameters
        for name, value in trained.items():
            model.state_dict()[name].copy_(value)
    indices = list(range((step - 1) * train.global_batch, step * train.global_batch))
    count_over_batch(model, _AllSamples(config, data), indices)
    task, samples = config.family.task(f, data, torch.device("cpu")), cells(config, indices)
    found, tokens = [], {}
    for cell, inside in enumerate(samples):
        values: Values = {}
        repeated: set[str] = set()
        batch = task.batch(range(inside[0], inside[-1] + 1))
        with probed(model, partial(_take, values, repeated)):
            config.family.run(model, batch.inputs, batch)
        found.append({name: value for name, value in values.items() if name not in repeated})
        if context is not None:
            layout = next(one for one in batch.conditions if isinstance(one, TokenLayout))
            tokens[cell] = [shard_indices(shard) for shard in context.shards(layout.documents)]
    epsilons = {
        name: module.eps for name, module in model.named_modules() if isinstance(module, nn.RMSNorm) and module.eps
    }
    return ReferencePass(found, tuple(map(tuple, samples)), tokens, epsilons)


def _take(values: Values, repeated: set[str], name: str, value: Tensor) -> None:
    if name in values:
        repeated.add(name)
    values[name] = value.clone()


class _AllSamples(Reference):
    """Runs samples through a model as the task's batches do, for routers that count all tokens of a step."""

    def __init__(self, config: RunConfig, data: TrainingData) -> None:
        self._family, self._task = config.family, config.family.task(run_facts(config), data, torch.device("cpu"))

    def loss(self, model: torch.nn.Module, indices: list[int]) -> torch.Tensor:
        batch = self._task.batch(range(indices[0], indices[-1] + 1))
        return self._family.run(model, batch.inputs, batch)
