"""Layout side of a proof as run: each rank trains as configured and records every step, without collectives."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.mesh.local_shards import to_local
from meshwright.models.contract.family import TrainingData
from meshwright.nn.dropout_add.module import DropoutAdd
from meshwright.plan.run_plan import RunPlan
from meshwright.prove.record.evidence import Contents
from meshwright.prove.record.layout_run import ShardsByName, Tamper, by_microbatch, local_gradients, local_weights
from meshwright.prove.record.recording_task import RecordingTask
from meshwright.train.build_job import Job, build_job
from meshwright.train.launch.rank_context import RankContext
from meshwright.train.train_step import TrainStep

DropoutCall = tuple[str, int, int, list[int]]
"""A call of a dropout: its name, hashes of its inputs and of its output, and the numbers of the tokens."""


@dataclass
class StepRecord:
    """Values of one step."""

    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    samples: list[int]
    contents: Contents
    """Digests of what each sample was, see `RecordingTask`."""
    gradients: ShardsByName
    """Shards of the gradients, before clipping."""


@dataclass
class AsRunRecord:
    """Values recorded by one rank; only numbers and tensors, for `torch.load` with `weights_only=True`."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    """Fields of a `StepRecord` of each step."""
    weights: list[ShardsByName] = field(default_factory=list)
    """Shards of parameters and saved buffers before the first step and after each step."""
    dropouts: list[DropoutCall] = field(default_factory=list)
    """Calls of dropouts in step 1."""
    loss_unit: str = ""

    def step(self, step: int) -> StepRecord:
        """Return the record of a step, counted from 1."""
        return StepRecord(**self.steps[step - 1])


def record_as_run(
    config: RunConfig,
    context: RankContext,
    data: TrainingData,
    *,
    num_steps: int,
    plan: RunPlan,
    tamper: Tamper | None = None,
) -> AsRunRecord:
    """Train for `num_steps` steps on this rank of an existing process group, on the CPU.

    Args:
        config: configuration returned by `as_configured`.
        context: context of this rank.
        data: training data.
        num_steps: number of steps, at least one.
        plan: plan of the layout.
        tamper: called on the job before the first step; used only by fault-injection tests.
    """
    job = build_job(config, plan, context, torch.device("cpu"))
    task = RecordingTask(config.family.task(run_facts(config), data, job.device), config.family.conditions)
    run_step = TrainStep(job, task, stop_requested=lambda: False)
    record = AsRunRecord(loss_unit=task.unit.unscaled().name)
    if tamper is not None:
        tamper(job, run_step)
    record.weights.append(local_weights(job))
    stop_recording = _record_dropouts(job, record.dropouts)
    for step in range(1, num_steps + 1):
        context.post("step", step)
        task.read, task.contents = [], {}
        loss = run_step.accumulate(step)
        stop_recording()
        gradients = local_gradients(job)
        result = run_step.update(step, loss)
        samples = by_microbatch(task.read, job)
        found = StepRecord(result.loss, result.grad_norm, result.lr, result.skipped, samples, task.contents, gradients)
        record.steps.append(vars(found))
        record.weights.append(local_weights(job))
    return record


def _record_dropouts(job: Job, calls: list[DropoutCall]) -> Callable[[], None]:
    """Record the calls of dropouts until the returned function is called; a compiled block records none."""
    hooks = []
    if not job.config.train.dropout or any(kind.compiled for kind in job.plan.kinds):
        return lambda: None
    for part in job.parts().values():
        for name, module in part.module.named_modules():
            if isinstance(module, DropoutAdd):

                def hook(_: Any, inputs: tuple[Any, ...], out: Tensor, name: str = name) -> None:
                    x, residual, rows = inputs
                    rows = [] if rows is None else to_local(rows).flatten().tolist()
                    calls.append((name, _hash(x, residual), _hash(out), rows))

                hooks.append(module.register_forward_hook(hook))

    def stop() -> None:
        while hooks:
            hooks.pop().remove()

    return stop


def _hash(*tensors: Tensor) -> int:
    code = 0
    for tensor in tensors:
        code = zlib.crc32(to_local(tensor.detach()).contiguous().view(torch.uint8).numpy().tobytes(), code)
    return code
