"""Seeded faults: what goes wrong in real trainings, done on purpose to a real job on real ranks.

Each damages a built job before its first step, never the reference; `FAULTS` says on which layout it is seeded and what
the proof must say about it. The names of parameters and ranks are part of what must be said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.config.facts_for_family import run_facts
from meshwright.mesh.local_shards import to_local
from meshwright.parallel.data_parallel import fsdp_modules
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


def replacing(owner: Any, name: str, change: Callable[[Job, Any], Any]) -> Tamper:
    """Replace a function of a module or class by `change(job, function)`; `Seed.planted` puts it back."""
    return lambda job, step: setattr(owner, name, change(job, getattr(owner, name)))


def wrapping(path: str, change: Callable[[Job, Any], Any]) -> Tamper:
    """Replace an attribute by `change(job, attribute)`, at a path such as `step.accumulate` or `job.optimizer.step`."""
    first, *inner, name = path.split(".")

    def tamper(job: Job, step: TrainStep) -> None:
        owner = reduce(getattr, inner, job if first == "job" else step)
        setattr(owner, name, change(job, getattr(owner, name)))

    return tamper


def modules(job: Job, kind: type[Any] = torch.nn.Module) -> Iterator[Any]:
    """All modules of a kind on this rank."""
    return (m for part in job.parts().values() for m in part.module.modules() if isinstance(m, kind))


def on_units(change: Callable[[Any], None]) -> Tamper:
    """Change all modules that FSDP2 shards."""
    return lambda job, step: [change(module) for module in fsdp_modules(job.model)] and None


def on_groups(change: Callable[[Job, Any], Any]) -> Tamper:
    """Change the settings of each of the optimizer's groups."""

    def tamper(job: Job, step: TrainStep) -> None:
        for group in job.optimizer.groups:
            group.settings = change(job, group.settings)

    return tamper


def after_backward(change: Callable[[Job], None], *, only_first: bool = False) -> Tamper:
    """Change gradients once they are reduced."""

    def wrap(job: Job, real: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
        def accumulate(number: int) -> Tensor:
            loss = real(number)
            if not only_first or number == 1:
                change(job)
            return loss

        return accumulate

    return wrapping("step.accumulate", wrap)


def changing(
    name: str, change: Callable[[Tensor], Any], *, rank: int | None = None, only_first: bool = False
) -> Tamper:
    """Change this rank's gradient of a parameter in place."""

    def damage(job: Job) -> None:
        if rank in (None, job.context.rank):
            change(to_local(job.model.get_parameter(name).grad))

    return after_backward(damage, only_first=only_first)


# ---- gradient reduction


class OwnChunk:
    """A reduce-scatter that keeps each rank's own contribution: the sum over dp_shard is missing."""

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: object, async_op: bool = False
    ) -> None:
        output_tensor.copy_(self.reduce(input_tensor.view(-1, output_tensor.numel()), group))

    def reduce(self, chunks: Tensor, group: Any) -> Tensor:
        """What this rank gets, given its contributions to all ranks."""
        return chunks[dist.get_rank(group)]


class NeighboursChunk(OwnChunk):
    """A reduce-scatter whose results go to the wrong ranks."""

    def reduce(self, chunks: Tensor, group: Any) -> Tensor:
        total = chunks.clone()
        dist.all_reduce(total, group=group)
        return total[(dist.get_rank(group) + 1) % len(chunks)]


def reducing(kind: Callable[[], OwnChunk]) -> Tamper:
    return on_units(lambda module: module.set_custom_reduce_scatter(kind()))


def divide_by(factor: float) -> Tamper:
    return on_units(lambda module: module.set_gradient_divide_factor(factor))


drop_reduce_scatter = reducing(OwnChunk)


def drop_all_reduce_of_replicas(job: Job, step: TrainStep) -> None:
    replicas, real = job.mesh["dp_replicate"].get_group(), dist.all_reduce
    dist.all_reduce = lambda x, *args, group=None, **kwargs: (
        None if group is replicas else real(x, *args, group=group, **kwargs)
    )


skip_partial_sums_over_tp = replacing(stages_module, "sync_partial_gradients", lambda job, real: lambda model: None)


def sum_accumulated_over_tp(job: Job, step: TrainStep) -> None:
    """All-reduce what has accumulated after every backward, as transformers' `replicated_with_grad_allreduce` does."""
    set_sync, sync = stages_module.set_gradient_sync, stages_module.sync_partial_gradients

    def sum_accumulated(model: torch.nn.Module) -> list[torch.nn.Parameter]:
        partial = [p for p in model.parameters() if isinstance(p.grad, DTensor) and p.grad.placements[0].is_partial()]
        for parameter in partial:
            dist.all_reduce(to_local(parameter.grad), group=parameter.grad.device_mesh.get_group("tp"))
        return partial

    def before_backward(model: torch.nn.Module, reduces: bool) -> None:
        sum_accumulated(model)
        set_sync(model, reduces)

    def after_last(model: torch.nn.Module) -> None:
        for parameter in sum_accumulated(model):
            local, of = to_local(parameter.grad), parameter.data
            parameter.grad = DTensor.from_local(local, of.device_mesh, of.placements, run_check=False)
        sync(model)

    stages_module.set_gradient_sync, stages_module.sync_partial_gradients = before_backward, after_last


# ---- micro-batches and samples


def repeat_first_microbatch(job: Job, step: TrainStep) -> None:
    """Micro-batch 0 runs in the place of 1: a stale buffer."""
    [row] = job.schedule.actions
    stale = tuple(replace(action, microbatch=0) if action.microbatch == 1 else action for action in row)
    table = replace(job.schedule, actions=(stale,))
    step._executor = step.pipeline.executor(table, batch_size=job.microbatch_size)


def overwriting(job: Job, real: Callable[..., None]) -> Callable[..., None]:
    """Each backward overwrites what was accumulated."""

    def sync(model: torch.nn.Module, last: bool) -> None:
        for parameter in model.parameters():
            parameter.grad = None
        real(model, last)

    return sync


keep_only_last_microbatch = replacing(stages_module, "set_gradient_sync", overwriting)


def first_share(job: Job, real: Callable[[int], list[range]]) -> Callable[[int], list[range]]:
    """Every rank reads share 0."""
    size, ranks = job.config.train.global_batch, job.axes.data_parallel()
    return lambda number: step_module.microbatch_samples(
        number - 1, global_batch=size, data_parallel=ranks, data_index=0, num_microbatches=len(real(number))
    )


def serve_share_0_everywhere(job: Job, step: TrainStep) -> None:
    """The rank asks for its own samples, but is given those of share 0."""
    task, shift = step._task._task, job.data_index * (job.config.train.global_batch // job.axes.data_parallel())
    own = task.batch
    task.batch = lambda samples: own(range(samples.start - shift, samples.stop - shift))


def loss_times(factor: Callable[[Job], float]) -> Tamper:
    """Scale the loss of each micro-batch."""
    return wrapping("step._task.loss_sum", lambda job, real: lambda out, targets: real(out, targets) * factor(job))


# ---- norm, clipping, optimizer, weights


def without_down(job: Job, real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    kept = [p for name, p in job.model.named_parameters() if name != "blocks.0.ffn.down.weight"]
    return lambda parameters, **others: real(kept, **others)


leave_out_of_norm = replacing(step_module, "local_squared_norm", without_down)
keep_norm_local = replacing(
    step_module, "all_reduce_sum", lambda job, real: lambda totals: totals * totals.new_tensor([2.0, 1.0, 1.0, 1.0])
)
rate_times_2 = replacing(step_module, "learning_rate", lambda job, real: lambda *at: 2.0 * real(*at))
decay_of_all = on_groups(lambda job, one: replace(one, weight_decay=job.config.train.weight_decay))


def freeze_by_accident(job: Job, step: TrainStep) -> None:
    """The optimizer was built before a parameter was replaced."""
    lost = job.model.get_parameter("blocks.1.attention.wv.weight")
    for group in job.optimizer.groups:
        group.members = [one for one in group.members if one.parameter is not lost]


def start_from_another_seed(job: Job, step: TrainStep) -> None:
    initialize(job.model.named_parameters(), job.family, replace(run_facts(job.config), seed=job.config.train.seed + 1))


SHARD2 = ("mesh.dp_shard=2",)
HYBRID = ("mesh.dp_replicate=2", "mesh.dp_shard=2")
TENSOR2 = ("mesh.tp=2",)
BOTH = ("mesh.tp=2", "mesh.dp_shard=2")
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
    "a NaN on one rank": Fault(changing("norm.weight", lambda g: g[:1].fill_(float("nan")), rank=1), SHARD2,
        ("not finite", "rank 1"), "norm.weight"),
    "one element is wrong on one rank": Fault(changing("blocks.0.ffn.gate.weight", lambda g: g[0, :1].add_(1.0), rank=1,
        only_first=True), SHARD2, ("only rank 1's shard differs",), "blocks.0.ffn.gate.weight"),
    "micro-batch 0 runs in the place of 1": Fault(repeat_first_microbatch, ACCUMULATE, ("micro-batch 1 is not read",
        "processed in its place"), "blocks.0.ffn.up.weight"),
    "accumulation is overwritten": Fault(keep_only_last_microbatch, ("train.num_microbatches=4",),
        ("only the last micro-batch",), "blocks.0.ffn.up.weight"),
    "every rank reads share 0": Fault(wrapping("step.samples", first_share), SHARD2, ("rank 1 read",
        "(the samples of rank 0)"), "embed.weight"),
    "step 2 reads step 1's samples": Fault(wrapping("step.samples", lambda job, real: lambda number: real(max(1,
        number - 1))), SHARD2, ("the sampler is 1 step behind",)),
    "a rank is given another rank's samples": Fault(serve_share_0_everywhere, SHARD2, ("differ only on rank 1",
        "given those of rank 0"), "blocks.0.ffn.up.weight"),
    "shares' means are summed": Fault(loss_times(lambda job: job.axes.data_parallel()), HYBRID,
        ("4.000 × the reference", "summed over dp_replicate × dp_shard (4 ranks)"), "norm.weight"),
    "a parameter is left out of the norm": Fault(leave_out_of_norm, SHARD2, ("left out of the norm",
        "blocks.0.ffn.down.weight")),
    "copies count several times in the norm": Fault(replacing(optimizer_module, "num_shards", lambda job,
        real: lambda tensor: job.axes.num_ranks()), TENSOR2, ("counted tp (2) times",)),
    "the norm is not reduced": Fault(keep_norm_local, SHARD2, ("different norms",)),
    "a parameter is not in the optimizer": Fault(freeze_by_accident, SHARD2, ("never updated",),
        "blocks.1.attention.wv.weight"),
    "the learning rate is doubled": Fault(rate_times_2, SHARD2, ("the learning rate of step 1 is",
        "2.000 times the learning rate in every step")),
    "norm weights decay": Fault(decay_of_all, SHARD2, ("weight decay",), "norm.weight"),
    "rank 1 has another seed": Fault(on_rank(1, start_from_another_seed), SHARD2, ("initial weights differ", "rank 1"),
        "embed.weight"),
    "rank 1 does not update": Fault(on_rank(1, wrapping("step._optimize", lambda job, real: lambda lr,
        grad_norm: None)), SHARD2, ("never updated", "the optimizer skipped rank 1's shard"), "embed.weight"),
    "a gradient is kept in bfloat16": Fault(changing("blocks.1.ffn.up.weight", lambda g: g.copy_(g.bfloat16())), SHARD2,
        ("rounded to bfloat16 on every rank",), "blocks.1.ffn.up.weight"),
    "a rank halves its loss": Fault(on_rank(1, wrapping("step._task.loss_sum", lambda job, real: lambda *args:
        real(*args) / 2)), SHARD2, ("the contribution of data-parallel rank 1 × 0.500", "multiplied on rank 1")),
    "the factor of clipping is a float32 number": Fault(replacing(step_module, "scale_gradients", lambda job, real:
        lambda parameters, factor: real(parameters, float(torch.tensor(factor)))), SHARD2,
        ("the factor is rounded to float32",)),
}  # fmt: skip
