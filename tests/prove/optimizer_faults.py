"""Seeded faults of clipping, learning rate and AdamW: the gradients are right, and the cause must be named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from meshwright.mesh.local_shards import to_local
from meshwright.prove.record.layout_run import Tamper
from meshwright.train import train_step as step_module
from meshwright.train.build_job import Job
from meshwright.train.train_step import TrainStep
from tests.prove.seeded_faults import SHARD2, Fault

NOT_CLIPPED = "train.max_grad_norm=100.0"
"""A limit that no step reaches by itself."""


def groups(**settings: Any) -> Tamper:
    """Another setting of the optimizer."""

    def tamper(job: Job, step: TrainStep) -> None:
        for group in job.optimizer.groups:
            group.settings = replace(group.settings, **settings)

    return tamper


def before_update(change: Callable[[Job], None]) -> Tamper:
    def tamper(job: Job, step: TrainStep) -> None:
        real = job.optimizer.step

        def update(lr: float) -> None:
            change(job)
            real(lr)

        job.optimizer.step = update  # type: ignore[method-assign]

    return tamper


def clear(*states: str) -> Callable[[Job], None]:
    def change(job: Job) -> None:
        for state in job.optimizer.state.values():
            for name in states:
                state[name].zero_()

    return change


def late_weights(steps: int) -> Tamper:
    """Forward and backward use weights that are late by some steps, and the update those that it should."""

    def tamper(job: Job, step: TrainStep) -> None:
        real, versions = step.accumulate, list[list[Tensor]]()
        held = [to_local(parameter.detach()) for parameter in job.model.parameters()]

        def accumulate(number: int) -> Tensor:
            versions.append([x.clone() for x in held])
            for x, value in zip(held, versions[max(0, len(versions) - 1 - steps)], strict=True):
                x.copy_(value)
            loss = real(number)
            for x, value in zip(held, versions[-1], strict=True):
                x.copy_(value)
            return loss

        step.accumulate = accumulate  # type: ignore[method-assign]

    return tamper


def leave_gathered(job: Job, step: TrainStep) -> None:
    """FSDP2 doesn't reshard after the backward."""
    for part in job.parts().values():
        for module in part.module.modules():
            if isinstance(module, FSDPModule):
                module.set_reshard_after_backward(False)


def decay_in_the_gradient(job: Job, step: TrainStep) -> None:
    decays = [(one.parameter, group.settings.weight_decay) for group in job.optimizer.groups for one in group.members]
    groups(weight_decay=0.0)(job, step)

    def change(job: Job) -> None:
        for p, decay in decays:
            to_local(p.grad).add_(to_local(p.detach()), alpha=decay)

    before_update(change)(job, step)


def decay_of_all(job: Job, step: TrainStep) -> None:
    groups(weight_decay=job.config.train.weight_decay)(job, step)


def twice_the_decay(job: Job, step: TrainStep) -> None:
    for group in job.optimizer.groups:
        group.settings = replace(group.settings, weight_decay=2 * group.settings.weight_decay)


def no_clipping(job: Job, step: TrainStep) -> None:
    step_module.scale_gradients = lambda parameters, factor: None


def clip_each_tensor(job: Job, step: TrainStep) -> None:
    real = step_module.scale_gradients

    def scale(parameters: Any, factor: float) -> None:
        for p in parameters:
            norm = float(p.grad.full_tensor().norm())
            real([p], min(1.0, job.config.train.max_grad_norm / norm))

    step_module.scale_gradients = scale


def clip_twice(job: Job, step: TrainStep) -> None:
    real = step_module.scale_gradients
    step_module.scale_gradients = lambda parameters, factor: real(parameters, factor**2)


def rate(change: Callable[[int], int]) -> Tamper:
    def tamper(job: Job, step: TrainStep) -> None:
        real = step_module.learning_rate
        step_module.learning_rate = lambda number, train: real(change(number), train)

    return tamper


def constant_rate(job: Job, step: TrainStep) -> None:
    step_module.learning_rate = lambda number, train: train.lr


def never_clear(job: Job, step: TrainStep) -> None:
    job.optimizer.zero_grad = lambda: None  # type: ignore[method-assign]


WARM = "train.warmup_steps=3"

OPTIMIZER_FAULTS: dict[str, Fault] = {
    "betas exchanged": Fault(groups(beta1=0.95, beta2=0.9), SHARD2, ("the betas are exchanged",)),
    "the betas of PyTorch": Fault(groups(beta1=0.9, beta2=0.999), SHARD2,
        ("other betas", "beta2 = 0.999 instead of 0.95")),
    "another epsilon": Fault(groups(eps=1e-6), SHARD2, ("another epsilon", "eps = 1e-06 instead of 1e-08")),
    "the first moment is cleared": Fault(before_update(clear("exp_avg")), SHARD2, ("the first moment is stale",)),
    "the second moment is cleared": Fault(before_update(clear("exp_avg_sq")), SHARD2, ("the second moment is stale",)),
    "the optimizer's state is cleared": Fault(before_update(clear("exp_avg", "exp_avg_sq")), SHARD2,
        ("both moments are stale",)),
    "weights are one step late": Fault(late_weights(1), SHARD2, ("use weights that are one step late",)),
    "weights are gathered once": Fault(late_weights(9), SHARD2, ("never see the updates: gathered weights are kept",)),
    "weights are left gathered": Fault(leave_gathered, SHARD2,
        ("weights left gathered: they are not resharded", "ranks 0 and 1 had a shard")),
    "decay in the gradient": Fault(decay_in_the_gradient, SHARD2, ("L2 regularisation",)),
    "decay is missing": Fault(groups(weight_decay=0.0), SHARD2, ("weight decay is missing",)),
    "everything decays": Fault(decay_of_all, SHARD2, ("decay",), "norm.weight"),
    "twice the decay": Fault(twice_the_decay, SHARD2, ("weight decay is applied", "twice")),
    "no clipping": Fault(no_clipping, SHARD2, ("clipping is missing",)),
    "no clipping, where no step reaches the limit": Fault(no_clipping, (*SHARD2, NOT_CLIPPED),
        ("clipping is missing",)),
    "clipping by tensor": Fault(clip_each_tensor, SHARD2, ("the norm of each tensor",)),
    "clipping twice": Fault(clip_twice, SHARD2, ("clipping is applied twice",)),
    "the rate of the step before": Fault(rate(lambda number: max(1, number - 1)), (*SHARD2, WARM),
        ("the learning rate is one step behind",)),
    "no warm-up": Fault(constant_rate, (*SHARD2, WARM), ("3 times the learning rate",)),
    "gradients are not cleared": Fault(never_clear, SHARD2, ("gradients are not cleared between steps",)),
}  # fmt: skip
