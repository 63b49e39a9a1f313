"""Layout side of a proof: each rank trains as in a normal run and records its local shards and their offsets.

Recording uses no collectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.mesh.local_shards import local_box, to_local
from meshwright.models.contract.family import TrainingData
from meshwright.models.contract.task import Batch, Task
from meshwright.pipeline.actions import ActionKind
from meshwright.plan.make_plan import make_plan
from meshwright.plan.run_plan import RunPlan
from meshwright.prove.expert_placement import expert_placement_of
from meshwright.prove.record.evidence import DTYPE, INITIAL, LayoutEvidence, RecordedShard, UnequalCopies
from meshwright.prove.stage_placement import stage_placement_of
from meshwright.train.build_job import Job, build_job
from meshwright.train.launch.rank_context import RankContext
from meshwright.train.train_step import TrainStep

ShardsByName = dict[str, tuple[tuple[int, ...], Tensor]]
"""Per parameter: offset and value of the local shard."""


@dataclass
class RankRecord:
    """Values recorded by one rank; only numbers and tensors, for `torch.load` with `weights_only=True`."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)
    gradients: ShardsByName = field(default_factory=dict)
    parameters: ShardsByName = field(default_factory=dict)
    initial: ShardsByName = field(default_factory=dict)
    after_first: ShardsByName = field(default_factory=dict)
    unequal: list[tuple[str, int, int, str, float]] = field(default_factory=list)
    """Fields of `UnequalCopies` except the rank: name, both stages, kind of value, largest difference."""
    loss_unit: str = ""
    """Name of the unit of `losses`."""


class RecordingTask(Task):
    """Task wrapper that records the indices of requested samples."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.unit, self.units_a_sample = task.unit, task.units_a_sample
        self.read: list[int] = []

    def batch(self, samples: range) -> Batch:
        """Return the wrapped task's batch and record its samples."""
        self.read.extend(samples)
        return self._task.batch(samples)

    def count(self, samples: range) -> int:
        """Delegate to the wrapped task."""
        return self._task.count(samples)

    def loss_sum(self, out: Tensor, targets: Tensor) -> Tensor:
        """Delegate to the wrapped task."""
        return self._task.loss_sum(out, targets)

    def validation(self, *, batch_size: int, data_parallel: int, data_index: int) -> list[Batch]:
        """Delegate to the wrapped task."""
        return self._task.validation(batch_size=batch_size, data_parallel=data_parallel, data_index=data_index)

    def validation_sums(self, out: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Delegate to the wrapped task."""
        return self._task.validation_sums(out, targets)


Tamper = Callable[[Job, TrainStep], None]
"""Function that injects a fault into a job, to test that the proof detects the fault."""


def record_rank(
    config: RunConfig,
    context: RankContext,
    corpus: TrainingData,
    *,
    num_steps: int,
    plan: RunPlan | None = None,
    tamper: Tamper | None = None,
) -> RankRecord:
    """Train for `num_steps` steps on this rank of an existing process group, on the CPU.

    Args:
        config: configuration returned by `as_proof`.
        context: context of this rank.
        corpus: training data.
        num_steps: number of steps, at least one.
        plan: plan of the layout; made from the configuration if None.
        tamper: called on the job before the first step; used only by fault-injection tests.
    """
    job = build_job(config, plan or make_plan(config), context, torch.device("cpu"))
    task = RecordingTask(config.family.task(run_facts(config), corpus, job.device))
    run_step = TrainStep(job, task, stop_requested=lambda: False)
    record = RankRecord(loss_unit=task.unit.unscaled().name)
    if tamper is not None:
        tamper(job, run_step)
    record.initial = _weights(job)
    record.unequal += _unequal_copies(job, INITIAL, lambda parameter: parameter.detach())
    for step in range(1, num_steps + 1):
        context.post("step", step)
        task.read = []
        loss = run_step.accumulate(step)
        if step == 1:
            gradients = {name: p.grad for name, p in job.model.named_parameters() if p.grad is not None}
            record.gradients = _local_shards(gradients)
            record.unequal += _unequal_copies(job, "gradient of step 1", lambda parameter: parameter.grad)
        result = run_step.update(step, loss)
        record.losses.append(result.loss)
        record.grad_norms.append(result.grad_norm)
        record.samples.append(_by_microbatch(task.read, job))
        if step == 1:
            record.after_first = _weights(job)
    record.parameters = _weights(job)
    record.unequal += _unequal_copies(job, "parameter after the last step", lambda parameter: parameter.detach())
    return record


def _unequal_copies(
    job: Job, what: str, value: Callable[[nn.Parameter], Tensor | None]
) -> list[tuple[str, int, int, str, float]]:
    """Return the shared-parameter copies that are not bitwise equal to this rank's first copy."""
    first: dict[str, tuple[int, nn.Parameter]] = {}
    unequal = []
    for stage, part in job.parts().items():
        for name, parameter in part.named_parameters():
            at, original = first.setdefault(name, (stage, parameter))
            a, b = value(original), value(parameter)
            if original is parameter or (a is None and b is None):
                continue
            if a is None or b is None:
                unequal.append((name, at, stage, what, math.inf))
            elif not torch.equal(to_local(a), to_local(b)):
                unequal.append((name, at, stage, what, float((to_local(a) - to_local(b)).abs().max())))
    return unequal


def _by_microbatch(read: list[int], job: Job) -> list[int]:
    """Reorder samples by micro-batch, since the schedule may run micro-batches in a different order."""
    row = (part for action in job.schedule.actions[job.pipeline_rank] for part in action.parts())
    order = list(dict.fromkeys(part.microbatch for part in row if part.kind is ActionKind.FORWARD))
    size, rest = divmod(len(read), len(order))
    if rest:
        return list(read)
    return [sample for m in sorted(order) for sample in read[order.index(m) * size :][:size]]


def _weights(job: Job) -> ShardsByName:
    buffers = {name: buffer.to(DTYPE) for name, buffer in job.model.named_buffers(saved_only=True)}
    return _local_shards({**{name: parameter.detach() for name, parameter in job.model.named_parameters()}, **buffers})


def _local_shards(tensors: dict[str, Tensor]) -> ShardsByName:
    return {name: (local_box(tensor).offset, to_local(tensor).clone()) for name, tensor in tensors.items()}


def gather_evidence(config: RunConfig, records: list[RankRecord], *, plan: RunPlan | None = None) -> LayoutEvidence:
    """Combine all ranks' records."""
    plan = plan or make_plan(config)

    def by_name(kind: str) -> dict[str, list[RecordedShard]]:
        shards: dict[str, list[RecordedShard]] = {}
        for rank, record in enumerate(records):
            for name, (offset, value) in getattr(record, kind).items():
                shards.setdefault(name, []).append(RecordedShard(rank, tuple(offset), value))
        return shards

    return LayoutEvidence(
        axes=config.mesh.axes(),
        num_microbatches=config.train.num_microbatches,
        losses=[record.losses for record in records],
        grad_norms=[record.grad_norms for record in records],
        samples=[record.samples for record in records],
        gradients=by_name("gradients"),
        parameters=by_name("parameters"),
        initial=by_name("initial"),
        after_first=by_name("after_first"),
        stages=stage_placement_of(plan),
        experts=expert_placement_of(plan),
        unequal=tuple(
            UnequalCopies(rank, name, (a, b), what, largest)
            for rank, record in enumerate(records)
            for name, a, b, what, largest in record.unequal
        ),
    )
