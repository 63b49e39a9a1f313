"""Layout side of a proof: each rank trains as in a normal run and records its local shards and their offsets; then it
tries steps that must be skipped.

Recording uses no collectives.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm.collectives import all_reduce_sum
from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.mesh.local_shards import to_local
from meshwright.models.contract.family import TrainingData
from meshwright.nn.dropout_add.module import DropoutAdd
from meshwright.pipeline.actions import ActionKind
from meshwright.plan.run_plan import RunPlan
from meshwright.prove.placement import expert_placement_of, stage_placement_of
from meshwright.prove.record.evidence import (
    INITIAL,
    DropoutCall,
    Evidence,
    RankRecord,
    RecordingTask,
    ShardsByName,
    StepRecord,
    local_shards,
)
from meshwright.prove.spec import clip_limit
from meshwright.train.build_job import Job, build_job, choose_device
from meshwright.train.launch.rank_context import RankContext
from meshwright.train.train_step import TrainStep

Tamper = Callable[[Job, TrainStep], None]
"""Function that injects a fault into a job, to test that the proof detects the fault."""


def record_rank(
    config: RunConfig,
    context: RankContext,
    data: TrainingData,
    *,
    num_steps: int,
    plan: RunPlan,
    as_run: bool = False,
    tamper: Tamper | None = None,
    nonfinite: bool = True,
) -> RankRecord:
    """Train for `num_steps` steps on this rank of an existing process group, on the device of the configuration.

    Args:
        config: configuration returned by `as_proof` or `as_configured`.
        context: context of this rank.
        data: training data.
        num_steps: number of steps, at least one.
        plan: plan of the layout.
        as_run: whether the run is proved as configured; otherwise clipping acts in the last step if it hasn't before.
        tamper: called on the job before the first step; used only by fault-injection tests.
        nonfinite: whether to try steps that must be skipped.
    """
    job, run_step, task = start_job(config, context, data, plan)
    record, given = RankRecord(loss_unit=task.unit.unscaled().name), _watch_optimizer(job)
    if tamper is not None:
        tamper(job, run_step)
    record.initial = local_weights(job)
    record.unequal += _unequal_copies(job, INITIAL, lambda parameter: parameter.detach())
    stop_recording, norms = _record_dropouts(job, record.dropouts) if as_run else (lambda: None), list[float]()
    for step in range(1, num_steps + 1):
        context.post("step", step)
        task.read, task.contents = [], {}
        loss = run_step.accumulate(step)
        stop_recording()
        gradients = local_gradients(job)
        if not record.unequal:
            record.unequal += _unequal_copies(job, f"gradient of step {step}", lambda parameter: parameter.grad)
        if not as_run:
            job.config = _with_limit(config, norms, step=step, num_steps=num_steps)
        given.clear()
        features = {name: feature.evidence() for name, feature in job.features.items()}
        result = run_step.update(step, loss)
        norms.append(result.grad_norm)
        lr, applied = given[-1] if given else (math.nan, {})
        found = StepRecord(
            result.loss, result.grad_norm, lr, result.skipped, by_microbatch(task.read, job), task.contents,
            gradients, applied, local_weights(job), features,
        )  # fmt: skip
        record.steps.append(vars(found))
    if not record.unequal:
        record.unequal += _unequal_copies(job, "parameter after the last step", lambda parameter: parameter.detach())
    if nonfinite and not as_run:
        task.read, task.contents = [], {}
        record.nonfinite = try_nonfinite_steps(job, run_step, num_steps + 1)
    return record


def start_job(
    config: RunConfig, context: RankContext, data: TrainingData, plan: RunPlan
) -> tuple[Job, TrainStep, RecordingTask]:
    """Build a job, with its step and a task that records what is read."""
    job = build_job(config, plan, context, choose_device(config, context))
    task = RecordingTask(config.family.task(run_facts(config), data, job.device), config.family.conditions)
    return job, TrainStep(job, task, stop_requested=lambda: False), task


def _watch_optimizer(job: Job) -> list[tuple[float, ShardsByName]]:
    """Return a list to which each step of the optimizer adds the learning rate and gradients that it is given."""
    given: list[tuple[float, ShardsByName]] = []
    real = job.optimizer.step

    def step(lr: float) -> None:
        given.append((lr, local_gradients(job)))
        real(lr)

    job.optimizer.step = step  # type: ignore[method-assign]
    return given


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


def local_weights(job: Job) -> ShardsByName:
    """Return copies of this rank's shards of parameters and saved buffers."""
    parameters = {name: parameter.detach() for name, parameter in job.model.named_parameters()}
    return local_shards({**parameters, **dict(job.model.named_buffers(saved_only=True))})


def local_gradients(job: Job) -> ShardsByName:
    """Return copies of this rank's shards of the gradients that there are."""
    return local_shards({name: p.grad for name, p in job.model.named_parameters() if p.grad is not None})


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
        code = zlib.crc32(to_local(tensor.detach()).cpu().contiguous().view(torch.uint8).numpy().tobytes(), code)
    return code


def gather_evidence(config: RunConfig, plan: RunPlan, records: list[RankRecord]) -> Evidence:
    """Combine all ranks' records."""
    return Evidence(
        config.mesh.axes(),
        config.train.num_microbatches,
        tuple(records),
        stages=stage_placement_of(plan),
        experts=expert_placement_of(plan),
    )


LOSS, GRADIENT = "loss", "gradient"


def try_nonfinite_steps(job: Job, run_step: TrainStep, step: int) -> dict[str, list[str]]:
    """Update twice with a further step's gradients, and return what changed on this rank, by what isn't finite.

    Gradients that are left count as changed: they would make all later steps wrong, or skipped.

    Rank 0 has the loss, and the last rank the gradient; if that rank trains nothing, it leaves the gradient out.

    Args:
        job: the job, after the steps of a proof.
        run_step: its step.
        step: the next step.
    """
    _agree_first(run_step)
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
            left = [name for name, parameter in job.model.named_parameters() if parameter.grad is not None]
            changed[what] += [f"{GRADIENT} of {name}" for name in left]
        _restore(job, before)
    return changed


def _agree_first(run_step: TrainStep) -> None:
    """Let the step end as one that is skipped if ranks don't agree: they would wait for each other in the reduction of
    experts' counts."""
    real = run_step.end

    def end(*, applied: bool) -> None:
        votes = all_reduce_sum(torch.tensor([int(applied), int(not applied)]))
        real(applied=applied and not votes.all())

    run_step.end = end  # type: ignore[method-assign]


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
    yield from ((f"buffer {name}", to_local(buffer)) for name, buffer in job.model.named_buffers(saved_only=True))
    for name, value in job.model.named_parameters():
        yield name, to_local(value.detach())
        for kind, moment in job.optimizer.state.get(value, {}).items():
            if isinstance(moment, Tensor):
                yield f"{kind} of {name}", to_local(moment)
