"""Steps with a loss or a gradient that isn't finite on one rank, which every rank must skip."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from meshwright.config.facts_for_family import run_facts
from meshwright.mesh.local_shards import to_local
from meshwright.models.contract.build_module import build_part
from meshwright.nn.step_handles import StepHandle
from meshwright.train.build_job import Job
from meshwright.train.train_step import TrainStep

LOSS, GRADIENT = "loss", "gradient"


def try_nonfinite_steps(job: Job, run_step: TrainStep, step: int) -> dict[str, list[str]]:
    """Update twice with a further step's gradients, and return what changed on this rank, by what isn't finite.

    Rank 0 has the loss, and the last rank the gradient; if that rank trains nothing, it leaves the gradient out.

    Args:
        job: the job, after the steps of a proof.
        run_step: its step.
        step: the next step.
    """
    # Ranks that don't agree would wait for each other in the reductions of counts. A stage may have no handle itself.
    model = build_part(job.config.family, run_facts(job.config), dtype=torch.float32)
    if any(isinstance(module, StepHandle) for module in model.modules()):
        return {}
    before = {name: value.clone() for name, value in _state(job)}
    finite_loss = run_step.accumulate(step)
    gradients = {parameter: parameter.grad for parameter in job.model.parameters()}
    changed = {}
    for what in (LOSS, GRADIENT):
        loss, is_damaged = finite_loss, True
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        if what == LOSS and job.context.rank == 0:
            loss = torch.full_like(loss, math.nan)
        elif what == GRADIENT and job.context.rank == job.context.num_ranks - 1:
            is_damaged = _damage_gradient(job)
        run_step.update(step, loss)
        if is_damaged:
            changed[what] = [name for name, value in _state(job) if not torch.equal(before.get(name, value), value)]
        _restore(job, before)
    return changed


def _damage_gradient(job: Job) -> bool:
    """Make a gradient infinite, and return whether there is one."""
    local = (to_local(p.grad) for p in job.counted_parameters() if p.grad is not None)
    largest = max(local, key=Tensor.numel, default=None)
    if largest is None or not largest.numel():
        return False
    largest[(0,) * largest.dim()] = math.inf
    return True


@torch.no_grad()
def _restore(job: Job, before: dict[str, Tensor]) -> None:
    """Undo a step that should have been skipped: NaN on some ranks would make the next one hang."""
    for name, value in _state(job):
        value.copy_(before.get(name, value))


def _state(job: Job) -> Iterator[tuple[str, Tensor]]:
    """Yield the local values that a skipped step must keep: parameters, saved buffers and the optimizer's moments."""
    tensors = chain(job.model.named_parameters(), job.model.named_buffers(saved_only=True))
    for name, value in tensors:
        yield name, to_local(value.detach())
        for kind, moment in job.optimizer.state.get(value, {}).items():
            if isinstance(moment, Tensor):
                yield f"{kind} of {name}", to_local(moment)
