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
from meshwright.pipeline.actions import ActionKind
from meshwright.plan.make_plan import make_plan
from meshwright.plan.run_plan import RunPlan
from meshwright.prove.placement import expert_placement_of, stage_placement_of
from meshwright.prove.record.evidence import DTYPE, INITIAL, LayoutEvidence, RecordedShard, UnequalCopies
from meshwright.prove.record.recording_task import RecordingTask
from meshwright.prove.spec import clip_limit
from meshwright.prove.untaken_paths.nonfinite_steps import try_nonfinite_steps
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
    contents: list[dict[int, dict[str, str]]] = field(default_factory=list)
    """[step]: digests of what each sample was, see `RecordingTask`."""
    gradients: ShardsByName = field(default_factory=dict)
    parameters: ShardsByName = field(default_factory=dict)
    initial: ShardsByName = field(default_factory=dict)
    after_first: ShardsByName = field(default_factory=dict)
    unequal: list[tuple[str, int, int, str, float]] = field(default_factory=list)
    """Fields of `UnequalCopies` except the rank: name, both stages, kind of value, largest difference."""
    rates: list[float] = field(default_factory=list)
    """Learning rate of each step."""
    nonfinite: dict[str, list[str]] = field(default_factory=dict)
    """What changed in steps that must be skipped, see `try_nonfinite_steps`."""
    loss_unit: str = ""
    """Name of the unit of `losses`."""


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
    nonfinite: bool = True,
) -> RankRecord:
    """Train for `num_steps` steps on this rank of an existing process group, on the CPU.

    Args:
        config: configuration returned by `as_proof`.
        context: context of this rank.
        corpus: training data.
        num_steps: number of steps, at least one.
        plan: plan of the layout; made from the configuration if None.
        tamper: called on the job before the first step; used only by fault-injection tests.
        nonfinite: whether to try steps that must be skipped.
    """
    job = build_job(config, plan or make_plan(config), context, torch.device("cpu"))
    task = RecordingTask(config.family.task(run_facts(config), corpus, job.device), config.family.conditions)
    run_step = TrainStep(job, task, stop_requested=lambda: False)
    record = RankRecord(loss_unit=task.unit.unscaled().name)
    if tamper is not None:
        tamper(job, run_step)
    record.initial = _weights(job)
    record.unequal += _unequal_copies(job, INITIAL, lambda parameter: parameter.detach())
    for step in range(1, num_steps + 1):
        context.post("step", step)
        task.read, task.contents = [], {}
        loss = run_step.accumulate(step)
        if step == 1:
            record.gradients = local_gradients(job)
            record.unequal += _unequal_copies(job, "gradient of step 1", lambda parameter: parameter.grad)
        job.config = _with_limit(config, record.grad_norms, step=step, num_steps=num_steps)
        result = run_step.update(step, loss)
        record.losses.append(result.loss)
        record.grad_norms.append(result.grad_norm)
        record.rates.append(result.lr)
        record.samples.append(by_microbatch(task.read, job))
        record.contents.append(task.contents)
        if step == 1:
            record.after_first = _weights(job)
    record.parameters = _weights(job)
    record.unequal += _unequal_copies(job, "parameter after the last step", lambda parameter: parameter.detach())
    if nonfinite:
        record.nonfinite = try_nonfinite_steps(job, run_step, num_steps + 1)
    return record


def _with_limit(config: RunConfig, norms: list[float], *, step: int, num_steps: int) -> RunConfig:
    limit = clip_limit(config, norms, step=step, num_steps=num_steps)
    if limit == config.train.max_grad_norm or not limit > 0:  # a norm that is not finite is a finding of its own
        return config
    return config.with_keys({"train.max_grad_norm": limit})


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


def by_microbatch(read: list[int], job: Job) -> list[int]:
    """Reorder samples by micro-batch, since the schedule may run micro-batches in a different order."""
    row = (part for action in job.schedule.actions[job.pipeline_rank] for part in action.parts())
    order = list(dict.fromkeys(part.microbatch for part in row if part.kind is ActionKind.FORWARD))
    size, rest = divmod(len(read), len(order))
    return list(read) if rest else [sample for m in sorted(order) for sample in read[order.index(m) * size :][:size]]


def _weights(job: Job) -> ShardsByName:
    return {name: (offset, value.to(DTYPE)) for name, (offset, value) in local_weights(job).items()}


def local_weights(job: Job) -> ShardsByName:
    """Return copies of this rank's shards of parameters and saved buffers."""
    parameters = {name: parameter.detach() for name, parameter in job.model.named_parameters()}
    return local_shards({**parameters, **dict(job.model.named_buffers(saved_only=True))})


def local_gradients(job: Job) -> ShardsByName:
    """Return copies of this rank's shards of the gradients that there are."""
    return local_shards({name: p.grad for name, p in job.model.named_parameters() if p.grad is not None})


def local_shards(tensors: dict[str, Tensor]) -> ShardsByName:
    """Return copies of this rank's shards of tensors."""
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
        contents=[record.contents for record in records],
        rates=[record.rates for record in records],
        nonfinite=[record.nonfinite for record in records],
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
