"""Seeded faults: what goes wrong in real trainings, done on purpose to a real job on real ranks.

Each damages a built job before its first step, never the reference; `FAULTS` says on which layout it is seeded and what
the proof must say about it. The names of parameters and ranks are part of what must be said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from meshwright.config.facts_for_family import run_facts
from meshwright.mesh.local_shards import to_local
from meshwright.pipeline.actions import Action
from meshwright.prove.record.layout_run import Tamper
from meshwright.train import optimizer as optimizer_module
from meshwright.train import pipeline_stages as stages_module
from meshwright.train import train_step as step_module
from meshwright.train.build_job import Job, initialize
from meshwright.train.train_step import TrainStep


@dataclass(frozen=True)
class Fault:
    """One seeded fault."""

    tamper: Tamper
    layout: tuple[str, ...]
    """Overrides of the configuration."""
    says: tuple[str, ...]
    """All of these stand somewhere in the report, in any case."""
    at: str = ""
    """A parameter that must be found wrong; empty where the fault is not in a parameter."""


# ---- ways to damage


def on(where: Callable[[Job], bool], tamper: Tamper) -> Tamper:
    """Damage some ranks only."""
    return lambda job, step: tamper(job, step) if where(job) else None


def on_rank(rank: int, tamper: Tamper) -> Tamper:
    return on(lambda job: job.context.rank == rank, tamper)


def on_axis(axis: str, at: int, tamper: Tamper) -> Tamper:
    return on(lambda job: job.axes.coordinate(job.context.rank)[axis] == at, tamper)


def replacing(owner: Any, name: str, change: Callable[[Job, Any], Any]) -> Tamper:
    """Replace a function of a module or class by `change(job, function)`; `Seed.planted` puts it back."""
    return lambda job, step: setattr(owner, name, change(job, getattr(owner, name)))


def wrapping(path: str, change: Callable[[Job, Any], Any]) -> Tamper:
    """Replace an attribute by `change(job, attribute)`, at a path such as `step.accumulate` or `job.optimizer.step`."""
    first, *inner, name = path.split(".")
    return lambda job, step: replacing(reduce(getattr, inner, job if first == "job" else step), name, change)(job, step)


def giving(change: Callable[[Job, Any], Any]) -> Callable[[Job, Any], Any]:
    """What `replacing` and `wrapping` take: the real function, whose result is changed."""
    return lambda job, real: lambda *args, **named: change(job, real(*args, **named))


def taking(change: Callable[..., tuple[Any, ...]]) -> Callable[[Job, Any], Any]:
    """The real function, whose arguments are changed."""
    return lambda job, real: lambda *args: real(*change(job, *args))


def each(kind: type[Any], change: Callable[[Job, Any], Any]) -> Tamper:
    """Change all modules of a kind."""
    return lambda job, step: [change(job, module) for module in modules(job, kind)] and None


def modules(job: Job, kind: type[Any] = torch.nn.Module) -> Iterator[Any]:
    """All modules of a kind on this rank."""
    return (m for part in job.parts().values() for m in part.module.modules() if isinstance(m, kind))


def wrapping_each(kind: type[Any], path: str, change: Callable[[Job, Any], Any]) -> Tamper:
    """As `wrapping`, in all modules of a kind."""
    *inner, name = path.split(".")
    return each(kind, lambda job, module: replacing(reduce(getattr, inner, module), name, change)(job, None))


def settings(change: Callable[[Job, Any], dict[str, Any]]) -> Tamper:
    """Change settings of each of the optimizer's groups."""
    return lambda job, step: (
        [
            setattr(group, "settings", replace(group.settings, **change(job, group.settings)))
            for group in job.optimizer.groups
        ]
        and None
    )


def after_backward(change: Callable[[Job], Any]) -> Tamper:
    """Change gradients once they are reduced."""
    return wrapping("step.accumulate", giving(lambda job, loss: (change(job), loss)[1]))


def changing(name: str, change: Callable[[torch.Tensor], Any]) -> Tamper:
    """Change a parameter's gradient in place."""
    return after_backward(lambda job: change(to_local(job.model.get_parameter(name).grad)))


def run_row(job: Job, step: TrainStep, row: Iterable[Action] | None = None) -> None:
    """Bind this rank's row again: another one, or the same to damaged stages and channels."""
    actions = list(job.schedule.actions)
    if row is not None:
        actions[job.pipeline_rank] = tuple(row)
    table = replace(job.schedule, actions=tuple(actions))
    step._executor = step.pipeline.executor(table, batch_size=job.microbatch_size)


# ---- gradient reduction


class OwnChunk:
    """A reduce-scatter that keeps each rank's own contribution: the sum over dp_shard is missing."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        output_tensor.copy_(self.reduce(input_tensor.view(-1, output_tensor.numel()), group))

    def reduce(self, chunks: torch.Tensor, group: Any) -> torch.Tensor:
        """What this rank gets, given its contributions to all ranks."""
        return chunks[dist.get_rank(group)]


class NeighboursChunk(OwnChunk):
    """A reduce-scatter whose results go to the wrong ranks."""

    def reduce(self, chunks, group):
        total = chunks.clone()
        dist.all_reduce(total, group=group)
        return total[(dist.get_rank(group) + 1) % len(chunks)]


def reducing(kind: Callable[[], OwnChunk]) -> Tamper:
    return each(FSDPModule, lambda job, unit: unit.set_custom_reduce_scatter(kind()))


def divide_by(factor: float) -> Tamper:
    return each(FSDPModule, lambda job, unit: unit.set_gradient_divide_factor(factor))


drop_reduce_scatter = reducing(OwnChunk)


def without_replicas(job, real):
    replicas = job.mesh["dp_replicate"].get_group()
    return lambda x, *args, group=None, **named: None if group is replicas else real(x, *args, group=group, **named)


drop_all_reduce_of_replicas = replacing(dist, "all_reduce", without_replicas)
skip_partial_sums_over_tp = replacing(stages_module, "sync_partial_gradients", lambda job, real: lambda model: None)


# ---- micro-batches and samples


def first_microbatch_again(job, step):
    """Micro-batch 0 runs in the place of 1: a stale buffer."""
    [row] = job.schedule.actions
    run_row(job, step, [action._replace(microbatch=0) if action.microbatch == 1 else action for action in row])


def overwriting(job, real):
    """Each backward overwrites what was accumulated."""
    return lambda model, last: (model.zero_grad(), real(model, last))[1]


keep_only_last_microbatch = replacing(stages_module, "set_gradient_sync", overwriting)


def of_share_0(job: Job, samples: range) -> range:
    """The samples of share 0 in the place of this rank's."""
    shift = job.data_index * (job.config.train.global_batch // job.axes.data_parallel())
    return range(samples.start - shift, samples.stop - shift)


serve_share_0_everywhere = wrapping("step._task._task.batch", taking(lambda job, samples: (of_share_0(job, samples),)))
"""The rank asks for its own samples, but is given those of share 0."""


def loss_times(factor: Callable[[Job], float]) -> Tamper:
    """Scale the loss of each micro-batch."""
    return wrapping("step._task.loss_sum", giving(lambda job, loss: loss * factor(job)))


# ---- norm, optimizer, weights


def without_down(job, real):
    kept = [p for name, p in job.model.named_parameters() if name != "blocks.0.ffn.down.weight"]
    return lambda parameters, **others: real(kept, **others)


leave_out_of_norm = replacing(step_module, "local_squared_norm", without_down)
keep_norm_local = replacing(
    step_module, "all_reduce_sum", lambda job, real: lambda totals: totals * totals.new_tensor([2.0, 1.0, 1.0, 1.0])
)


def freeze_by_accident(job, step):
    """The optimizer was built before a parameter was replaced."""
    lost = job.model.get_parameter("blocks.1.attention.wv.weight")
    for group in job.optimizer.groups:
        group.members = [one for one in group.members if one.parameter is not lost]


def start_from_another_seed(job, step):
    initialize(job.model.named_parameters(), job.family, replace(run_facts(job.config), seed=job.config.train.seed + 1))


# ---- steps that must be skipped: a proof tries them after its own steps

ALWAYS_FINITE = SimpleNamespace(isfinite=lambda value: True, sqrt=math.sqrt, nan=math.nan)


def own_decision(job, real):
    """Each rank looks at its own loss: the total is made finite where the own one is."""

    def reduce(totals):
        is_finite, total = totals.isfinite().all(), real(totals)
        return total.nan_to_num(nan=1.0, posinf=1.0) if is_finite else total

    return reduce


def decay_if_skipped(job, result):
    """Weights decay in every step, skipped or not."""
    for p in job.model.parameters() if result.skipped else ():
        p.data.mul_(0.999)
    return result


def kept_if_skipped(job, real):
    """A skipped step goes on before gradients are cleared."""
    ran, step = [], job.optimizer.step
    job.optimizer.step = lambda lr: ran.append(lr) or step(lr)

    def clear():
        if ran:
            real()
        ran.clear()

    return clear


SHARD2 = ("mesh.dp_shard=2",)
HYBRID = ("mesh.dp_replicate=2", "mesh.dp_shard=2")
TENSOR2 = ("mesh.tp=2",)
ACCUMULATE = ("mesh.dp_shard=2", "train.num_microbatches=4")

FAULTS: dict[str, Fault] = {
    "the reduce-scatter over dp_shard is dropped": Fault(drop_reduce_scatter, SHARD2,
        ("the sum over dp_shard is missing",), "blocks.0.ffn.up.weight"),
    "the all-reduce over dp_replicate is dropped": Fault(drop_all_reduce_of_replicas, HYBRID,
        ("the sum over dp_replicate is missing",), "blocks.0.ffn.up.weight"),
    "the sum over tp of norm weights is dropped": Fault(skip_partial_sums_over_tp, TENSOR2,
        ("the sum over tp is missing",), "blocks.0.attention_norm.weight"),
    "gradients are twice the mean": Fault(divide_by(0.5), SHARD2, ("2.000 × the reference",
        "summed over dp_shard (2 ranks) instead of averaged"), "norm.weight"),
    "gradients are divided by the world size": Fault(divide_by(4.0), HYBRID, ("0.250 × the reference",
        "averaged over dp_replicate × dp_shard (4 ranks)"), "norm.weight"),
    "reduced pieces go to the wrong ranks": Fault(reducing(NeighboursChunk), SHARD2,
        ("ranks 0 and 1 hold each other's shard",), "blocks.0.attention.wq.weight"),
    "one gradient is counted twice": Fault(changing("blocks.1.ffn.up.weight", lambda g: g.mul_(2.0)), SHARD2,
        ("2.000 × the reference",), "blocks.1.ffn.up.weight"),
    "a sign is flipped": Fault(changing("blocks.0.attention.wo.weight", lambda g: g.neg_()), SHARD2, ("sign is flipped",
        ), "blocks.0.attention.wo.weight"),
    "a gradient is lost": Fault(changing("blocks.1.attention.wk.weight", lambda g: g.zero_()), SHARD2,
        ("no gradient reached",), "blocks.1.attention.wk.weight"),
    "a NaN on one rank": Fault(on_rank(1, changing("norm.weight", lambda g: g[:1].fill_(float("nan")))), SHARD2,
        ("not finite", "rank 1"), "norm.weight"),
    "one element is wrong on one rank": Fault(on_rank(1, changing("blocks.0.ffn.gate.weight",
        lambda g: g[0, :1].add_(1.0))), SHARD2, ("only rank 1's shard differs",), "blocks.0.ffn.gate.weight"),
    "micro-batch 0 runs in the place of 1": Fault(first_microbatch_again, ACCUMULATE, ("micro-batch 1 is not read",
        "processed in its place"), "blocks.0.ffn.up.weight"),
    "accumulation is overwritten": Fault(keep_only_last_microbatch, ("train.num_microbatches=4",),
        ("only the last micro-batch",), "blocks.0.ffn.up.weight"),
    "every rank reads share 0": Fault(wrapping("step.samples", giving(lambda job, found:
        [of_share_0(job, one) for one in found])), SHARD2, ("rank 1 read", "(the samples of rank 0)"), "embed.weight"),
    "step 2 reads step 1's samples": Fault(wrapping("step.samples",
        taking(lambda job, number: (max(1, number - 1),))), SHARD2, ("the sampler is 1 step behind",)),
    "a rank is given another rank's samples": Fault(serve_share_0_everywhere, SHARD2,
        ("inputs and targets of samples differ only on rank 1", "was given those of rank 0",
        "those of sample 0"), "blocks.0.ffn.up.weight"),
    "shares' means are summed": Fault(loss_times(lambda job: job.axes.data_parallel()), HYBRID,
        ("4.000 × the reference", "summed over dp_replicate × dp_shard (4 ranks)"), "norm.weight"),
    "a parameter is left out of the norm": Fault(leave_out_of_norm, SHARD2, ("left out of the norm",
        "blocks.0.ffn.down.weight")),
    "copies count several times in the norm": Fault(replacing(optimizer_module, "num_shards", lambda job,
        real: lambda tensor: job.axes.num_ranks()), TENSOR2, ("counted tp (2) times",)),
    "the norm is not reduced": Fault(keep_norm_local, SHARD2, ("different norms",)),
    "a parameter is not in the optimizer": Fault(freeze_by_accident, SHARD2, ("never updated",),
        "blocks.1.attention.wv.weight"),
    "the learning rate is doubled": Fault(replacing(step_module, "learning_rate", giving(lambda job, rate: 2.0 * rate)),
        SHARD2, ("the learning rate of step 1 is", "2.000 times the learning rate in every step")),
    "norm weights decay": Fault(settings(lambda job, one: {"weight_decay": job.config.train.weight_decay}), SHARD2,
        ("weight decay",), "norm.weight"),
    "rank 1 has another seed": Fault(on_rank(1, start_from_another_seed), SHARD2, ("initial weights differ", "rank 1"),
        "embed.weight"),
    "rank 1 does not update": Fault(on_rank(1, wrapping("step._optimize", lambda job, real: lambda lr, grad_norm:
        None)), SHARD2, ("never updated", "the optimizer skipped rank 1's shard"), "embed.weight"),
    "a gradient is kept in bfloat16": Fault(changing("blocks.1.ffn.up.weight", lambda g: g.copy_(g.bfloat16())), SHARD2,
        ("rounded to bfloat16 on every rank",), "blocks.1.ffn.up.weight"),
    "a rank halves its loss": Fault(on_rank(1, loss_times(lambda job: 0.5)), SHARD2,
        ("the contribution of data-parallel rank 1 × 0.500", "multiplied on rank 1")),
    "the factor of clipping is a float32 number": Fault(replacing(step_module, "scale_gradients", taking(lambda job,
        parameters, factor: (parameters, float(torch.tensor(factor))))), SHARD2, ("the factor is rounded to float32",)),
}  # fmt: skip
BRANCH_FAULTS: dict[str, Fault] = {
    "steps are never skipped": Fault(replacing(step_module, "math", lambda job, real: ALWAYS_FINITE), SHARD2,
        ("a step whose loss is not finite on rank 0 changes ranks 0 and 1", "must be skipped")),
    "the norm doesn't count": Fault(replacing(step_module, "local_squared_norm", giving(lambda job, norm:
        norm.nan_to_num(posinf=1.0))), SHARD2,
        ("a step whose gradient is not finite on rank 1 changes ranks 0 and 1",)),
    "each rank decides alone": Fault(replacing(step_module, "all_reduce_sum", own_decision), HYBRID,
        ("a step whose loss is not finite on rank 0 changes ranks 1, 2 and 3", "must agree")),
    "a skipped step decays the weights": Fault(wrapping("step.update", giving(decay_if_skipped)), SHARD2,
        ("changes ranks 0 and 1", "parameters change, but no moment")),
    "a skipped step keeps its gradients": Fault(wrapping("job.optimizer.zero_grad", kept_if_skipped), SHARD2,
        ("changes ranks 0 and 1", "gradients are not cleared")),
}  # fmt: skip
EXPERT_BRANCH_FAULTS: dict[str, Fault] = {
    "a skipped step counts its experts' tokens": Fault(wrapping("step._handles.end_step", lambda job, real:
        lambda *, applied: real(applied=True)), SHARD2, ("changes ranks 0 and 1", "enter buffers")),
    "ranks with experts decide alone": Fault(replacing(step_module, "all_reduce_sum", own_decision), SHARD2,
        ("a step whose loss is not finite on rank 0 changes rank 1", "must agree")),
}  # fmt: skip
