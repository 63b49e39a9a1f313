"""Seeded faults: what goes wrong in real trainings, done on purpose to a real job on real ranks.

Each is a function of (job, step) that damages a built job before its first step; `FAULTS` says on which layout it is
seeded and what the proof must say about it. The names of parameters and ranks are part of what must be said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.config.facts_for_family import run_facts
from meshwright.mesh.local_shards import to_local
from meshwright.parallel.data_parallel import fsdp_modules
from meshwright.prove.record.layout_run import Tamper
from meshwright.prove.record.recording_task import RecordingTask
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


def on(where: Callable[[Job], bool], tamper: Tamper) -> Tamper:
    """Damage some ranks only."""
    return lambda job, step: tamper(job, step) if where(job) else None


# ---- gradient reduction


class OwnChunk:
    """A reduce-scatter that keeps each rank's own contribution: the sum over dp_shard is missing."""

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: object, op: object, async_op: bool = False
    ) -> None:
        rank, size = dist.get_rank(group), output_tensor.numel()  # type: ignore[arg-type]
        output_tensor.copy_(input_tensor[rank * size : (rank + 1) * size])


class NeighboursChunk(OwnChunk):
    """A reduce-scatter whose results go to the wrong ranks."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: object, op: object, async_op: bool = False
    ) -> None:
        world, rank, size = dist.get_world_size(group), dist.get_rank(group), output_tensor.numel()  # type: ignore[arg-type]
        total = input_tensor.clone()
        dist.all_reduce(total, group=group)  # type: ignore[arg-type]
        place = (rank + 1) % world
        output_tensor.copy_(total[place * size : (place + 1) * size])


def drop_reduce_scatter(job: Job, step: TrainStep) -> None:
    for module in fsdp_modules(job.model):
        module.set_custom_reduce_scatter(OwnChunk())


def scatter_to_wrong_ranks(job: Job, step: TrainStep) -> None:
    for module in fsdp_modules(job.model):
        module.set_custom_reduce_scatter(NeighboursChunk())


def divide_by(factor: float) -> Tamper:
    def tamper(job: Job, step: TrainStep) -> None:
        for module in fsdp_modules(job.model):
            module.set_gradient_divide_factor(factor)

    return tamper


def drop_all_reduce_of_replicas(job: Job, step: TrainStep) -> None:
    assert job.mesh is not None
    replicas, real = job.mesh["dp_replicate"].get_group(), dist.all_reduce
    dist.all_reduce = lambda x, *args, group=None, **kwargs: (  # restored by the test
        None if group is replicas else real(x, *args, group=group, **kwargs)
    )


def skip_partial_sums_over_tp(job: Job, step: TrainStep) -> None:
    stages_module.sync_partial_gradients = lambda model: None


def sum_accumulated_over_tp(job: Job, step: TrainStep) -> None:
    """All-reduce what has accumulated after every backward, as transformers' `replicated_with_grad_allreduce` does."""
    set_sync, sync = stages_module.set_gradient_sync, stages_module.sync_partial_gradients

    def sum_accumulated(model: torch.nn.Module) -> list[torch.nn.Parameter]:
        partial = [p for p in model.parameters() if isinstance(p.grad, DTensor) and p.grad.placements[0].is_partial()]
        for parameter in partial:
            dist.all_reduce(to_local(parameter.grad), group=parameter.grad.device_mesh.get_group("tp"))  # type: ignore[arg-type, union-attr]
        return partial

    def before_backward(model: torch.nn.Module, reduces: bool) -> None:
        sum_accumulated(model)
        set_sync(model, reduces)

    def after_last(model: torch.nn.Module) -> None:
        for parameter in sum_accumulated(model):
            local, of = to_local(parameter.grad), parameter.data  # type: ignore[arg-type]
            parameter.grad = DTensor.from_local(local, of.device_mesh, of.placements, run_check=False)  # type: ignore[attr-defined]
        sync(model)

    stages_module.set_gradient_sync = before_backward
    stages_module.sync_partial_gradients = after_last


def after_backward(change: Callable[[Job], None], *, only_first: bool = False) -> Tamper:
    """Change gradients once they are reduced."""

    def tamper(job: Job, step: TrainStep) -> None:
        real = step.accumulate

        def accumulate(number: int) -> Tensor:
            loss = real(number)
            if not only_first or number == 1:
                change(job)
            return loss

        step.accumulate = accumulate  # type: ignore[method-assign]

    return tamper


def _scale_gradient(job: Job, name: str, factor: float) -> None:
    to_local(job.model.get_parameter(name).grad).mul_(factor)  # type: ignore[arg-type]


def double_one(job: Job) -> None:
    _scale_gradient(job, "blocks.1.ffn.up.weight", 2.0)


def flip_sign(job: Job) -> None:
    _scale_gradient(job, "blocks.0.attention.wo.weight", -1.0)


def lose_gradient(job: Job) -> None:
    _scale_gradient(job, "blocks.1.attention.wk.weight", 0.0)


def poison(job: Job) -> None:
    if job.context.rank == 1:
        to_local(job.model.get_parameter("norm.weight").grad)[0] = float("nan")  # type: ignore[arg-type]


def one_rank_off(job: Job) -> None:
    if job.context.rank == 1:
        to_local(job.model.get_parameter("blocks.0.ffn.gate.weight").grad)[0, 0] += 1.0  # type: ignore[arg-type]


# ---- micro-batches and samples


def repeat_first_microbatch(job: Job, step: TrainStep) -> None:
    """Micro-batch 0 runs in the place of 1: a stale buffer."""
    [row] = job.schedule.actions
    stale = tuple(replace(action, microbatch=0) if action.microbatch == 1 else action for action in row)
    table = replace(job.schedule, actions=(stale,))
    step._executor = step.pipeline.executor(table, batch_size=job.microbatch_size)


def keep_only_last_microbatch(job: Job, step: TrainStep) -> None:
    """Each backward overwrites what was accumulated."""
    real = stages_module.set_gradient_sync

    def sync(model: torch.nn.Module, last: bool) -> None:
        for parameter in model.parameters():
            parameter.grad = None
        real(model, last)

    stages_module.set_gradient_sync = sync


def read_same_share(job: Job, step: TrainStep) -> None:
    """Every rank reads share 0."""
    real = step.samples
    step.samples = lambda number: step_module.microbatch_samples(  # type: ignore[method-assign]
        number - 1,
        global_batch=job.config.train.global_batch,
        data_parallel=job.axes.data_parallel(),
        data_index=0,
        num_microbatches=len(real(number)),
    )


def read_previous_batch(job: Job, step: TrainStep) -> None:
    """Off by one: step 2 reads step 1's samples again, as after a resume that lost its position."""
    real = step.samples
    step.samples = lambda number: real(max(1, number - 1))  # type: ignore[method-assign]


def serve_share_0_everywhere(job: Job, step: TrainStep) -> None:
    """The rank asks for its own samples, but is given those of share 0."""
    task = step._task
    assert isinstance(task, RecordingTask)
    own = task._task.batch
    shift = job.data_index * (job.config.train.global_batch // job.axes.data_parallel())
    task._task.batch = lambda samples: own(  # type: ignore[method-assign]
        range(samples.start - shift, samples.stop - shift)
    )


def sum_losses_of_shares(job: Job, step: TrainStep) -> None:
    """Each rank takes the mean over its own share, and the shares are summed."""
    real = step._task.loss_sum
    step._task.loss_sum = lambda out, targets: (  # type: ignore[method-assign]
        real(out, targets) * job.axes.data_parallel()
    )


# ---- norm, clipping, optimizer, weights


def leave_out_of_norm(job: Job, step: TrainStep) -> None:
    kept = [p for name, p in job.model.named_parameters() if name != "blocks.0.ffn.down.weight"]
    real = step_module.local_squared_norm
    step_module.local_squared_norm = lambda parameters, **others: real(kept, **others)


def count_copies_in_norm(job: Job, step: TrainStep) -> None:
    """What several ranks hold is counted by each."""
    optimizer_module.num_shards = lambda tensor: job.axes.num_ranks()


def keep_norm_local(job: Job, step: TrainStep) -> None:
    step_module.all_reduce_sum = lambda totals: totals * totals.new_tensor([2.0, 1.0, 1.0, 1.0])


def freeze_by_accident(job: Job, step: TrainStep) -> None:
    """The optimizer was built before a parameter was replaced."""
    lost = job.model.get_parameter("blocks.1.attention.wv.weight")
    for group in job.optimizer.groups:
        group.members = [one for one in group.members if one.parameter is not lost]


def double_learning_rate(job: Job, step: TrainStep) -> None:
    real = step_module.learning_rate
    step_module.learning_rate = lambda number, train: 2.0 * real(number, train)


def decay_norms(job: Job, step: TrainStep) -> None:
    for group in job.optimizer.groups:
        group.settings = replace(group.settings, weight_decay=job.config.train.weight_decay)


def other_seed_on_rank_1(job: Job, step: TrainStep) -> None:
    if job.context.rank == 1:
        f = replace(run_facts(job.config), seed=job.config.train.seed + 1)
        initialize(job.model.named_parameters(), job.family, f)


def skip_update_on_rank_1(job: Job, step: TrainStep) -> None:
    if job.context.rank == 1:
        step._optimize = lambda lr, grad_norm: None  # type: ignore[method-assign]


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
    "gradients are twice the mean": Fault(divide_by(0.5), SHARD2,
        ("2.000 × the reference", "summed over dp_shard (2 ranks) instead of averaged"), "norm.weight"),
    "gradients are divided by the world size": Fault(divide_by(4.0), HYBRID,
        ("0.250 × the reference", "averaged over dp_replicate × dp_shard (4 ranks)"), "norm.weight"),
    "reduced pieces go to the wrong ranks": Fault(scatter_to_wrong_ranks, SHARD2,
        ("ranks 0 and 1 hold each other's shard",), "blocks.0.attention.wq.weight"),
    "one gradient is counted twice": Fault(after_backward(double_one), SHARD2, ("2.000 × the reference",),
        "blocks.1.ffn.up.weight"),
    "a sign is flipped": Fault(after_backward(flip_sign), SHARD2, ("sign is flipped",), "blocks.0.attention.wo.weight"),
    "a gradient is lost": Fault(after_backward(lose_gradient), SHARD2, ("no gradient reached",),
        "blocks.1.attention.wk.weight"),
    "a NaN on one rank": Fault(after_backward(poison), SHARD2, ("not finite", "rank 1"), "norm.weight"),
    "one element is wrong on one rank": Fault(after_backward(one_rank_off, only_first=True), SHARD2,
        ("only rank 1's shard differs",), "blocks.0.ffn.gate.weight"),
    "micro-batch 0 runs in the place of 1": Fault(repeat_first_microbatch, ACCUMULATE,
        ("micro-batch 1", "micro-batch 0"), "blocks.0.ffn.up.weight"),
    "accumulation is overwritten": Fault(keep_only_last_microbatch, ("train.num_microbatches=4",),
        ("only the last micro-batch",), "blocks.0.ffn.up.weight"),
    "every rank reads share 0": Fault(read_same_share, SHARD2, ("rank 1 read", "(the samples of rank 0)"),
        "embed.weight"),
    "step 2 reads step 1's samples": Fault(read_previous_batch, SHARD2, ("the sampler is 1 step behind",)),
    "a rank is given another rank's samples": Fault(serve_share_0_everywhere, SHARD2,
        ("rank 1 read the samples of data-parallel rank 0",), "blocks.0.ffn.up.weight"),
    "shares' means are summed": Fault(sum_losses_of_shares, HYBRID,
        ("4.000 × the reference", "summed over dp_replicate × dp_shard (4 ranks)"), "norm.weight"),
    "a parameter is left out of the norm": Fault(leave_out_of_norm, SHARD2,
        ("left out of the norm", "blocks.0.ffn.down.weight")),
    "copies count several times in the norm": Fault(count_copies_in_norm, TENSOR2, ("counted tp (2) times",)),
    "the norm is not reduced": Fault(keep_norm_local, SHARD2, ("different norms",)),
    "a parameter is not in the optimizer": Fault(freeze_by_accident, SHARD2, ("never updated",),
        "blocks.1.attention.wv.weight"),
    "the learning rate is doubled": Fault(double_learning_rate, SHARD2,
        ("updated by 2.000 × the reference step", "2 times the learning rate"), "embed.weight"),
    "norm weights decay": Fault(decay_norms, SHARD2, ("weight decay",), "norm.weight"),
    "rank 1 has another seed": Fault(other_seed_on_rank_1, SHARD2, ("initial weights differ", "rank 1"),
        "embed.weight"),
    "rank 1 does not update": Fault(skip_update_on_rank_1, SHARD2,
        ("never updated", "the optimizer skipped rank 1's shard"), "embed.weight"),
}  # fmt: skip
