"""Seeded faults of clipping, learning rates, AdamW and Muon: the gradients are right, and the cause must be named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from meshwright.mesh.local_shards import to_local
from meshwright.optim.catalogue import COEFFICIENTS, SGD, TINY, Muon
from meshwright.optim.contract import Settings, Slot
from meshwright.optim.owner_updates import Site
from meshwright.prove.record.layout_run import Tamper
from meshwright.train import train_step as step_module
from meshwright.train.build_job import Job
from meshwright.train.train_step import TrainStep
from tests.prove.seeded_faults import SHARD2, Fault, decay_of_all, modules, on_groups, replacing, wrapping

NOT_CLIPPED = "train.max_grad_norm=100.0"
"""A limit that no step reaches by itself."""


def settings(**others: Any) -> Tamper:
    """Other settings of the optimizer."""
    return on_groups(lambda job, one: replace(one, **others))


def scaling(change: Callable[[Any], Any]) -> Tamper:
    """Another way to scale gradients by the clip factor."""
    return replacing(step_module, "scale_gradients", lambda job, real: change(real))


def rates(change: Callable[[Any], Any]) -> Tamper:
    return replacing(step_module, "learning_rate", lambda job, real: change(real))


def before_update(change: Callable[[Job], Any]) -> Tamper:
    return wrapping("job.optimizer.step", lambda job, real: lambda lr: (change(job), real(lr))[1])


def clearing(*states: str) -> Tamper:
    """States of the optimizer are lost before each step."""
    return before_update(lambda job: [one[name].zero_() for one in job.optimizer.state.values() for name in states])


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
    for module in modules(job, FSDPModule):
        module.set_reshard_after_backward(False)


def decay_in_the_gradient(job: Job, step: TrainStep) -> None:
    decays = [(one.parameter, group.settings.weight_decay) for group in job.optimizer.groups for one in group.members]
    settings(weight_decay=0.0)(job, step)
    before_update(lambda job: [to_local(p.grad).add_(to_local(p.detach()), alpha=decay) for p, decay in decays])(
        job, step
    )


def clip_each_tensor(job: Job, real: Callable[..., None]) -> Callable[..., None]:
    limit = job.config.train.max_grad_norm
    return lambda ps, factor: [real([p], min(1.0, limit / float(p.grad.full_tensor().norm()))) for p in ps] and None


# ---- Muon


class PlainMomentum(Muon):
    def prepare(self, slot: Slot, settings: Settings) -> Tensor:
        return slot.state["momentum"].mul_(settings.momentum).add_(slot.gradient).clone()


class Unscaled(Muon):
    def apply(self, slot: Slot, update: Tensor, settings: Settings) -> None:
        super().apply(slot, update / max(slot.shape) ** 0.5, settings)


class Forgetful(Muon):
    def prepare(self, slot: Slot, settings: Settings) -> Tensor:
        slot.state["momentum"].zero_()
        return super().prepare(slot, settings)


class FourIterations(Muon):
    def transform(self, matrices: Tensor) -> Tensor:
        a, b, c = COEFFICIENTS
        x = matrices / (matrices.square().sum((-2, -1), keepdim=True).sqrt() + TINY)
        for _ in range(4):
            gram = x @ x.mT
            x = a * x + (b * gram + c * (gram @ gram)) @ x
        return x


class NeighboursUpdate(Muon):
    def transform(self, matrices: Tensor) -> Tensor:
        return super().transform(matrices).roll(1, 0)


def another(optimizer: type[Muon]) -> Tamper:
    """Another optimizer of matrices."""

    def tamper(job: Job, step: TrainStep) -> None:
        changed = optimizer()
        for group in job.optimizer.groups:
            if isinstance(group.optimizer, Muon):
                group.optimizer = changed
        assert job.optimizer._owners is not None
        job.optimizer._owners._optimizer = changed

    return tamper


def shards_alone(job: Job, step: TrainStep) -> None:
    """Each rank makes its own shard orthogonal."""

    def run(slots: Mapping[Site, tuple[Slot, Settings]]) -> None:
        for slot, settings in slots.values():
            Muon().update([slot], settings)

    assert job.optimizer._owners is not None
    job.optimizer._owners.run = run  # type: ignore[method-assign]


def keep_momentum(job: Job, step: TrainStep) -> None:
    """Owners send matrices back as they came."""
    assert job.optimizer._owners is not None
    job.optimizer._owners._transform = list  # type: ignore[method-assign, assignment]


class DampenedSGD(SGD):
    def update(self, slots: Sequence[Slot], settings: Settings) -> None:
        for slot in slots:
            momentum = slot.state["momentum"].mul_(settings.momentum).add_(slot.gradient, alpha=1 - settings.momentum)
            slot.parameter.mul_(1 - settings.lr * settings.weight_decay).add_(momentum, alpha=-settings.lr)


def dampened(job: Job, step: TrainStep) -> None:
    for group in job.optimizer.groups:
        group.optimizer = DampenedSGD()


def after_update(change: Callable[[Job, float], Any]) -> Tamper:
    return wrapping("job.optimizer.step", lambda job, real: lambda lr: (real(lr), change(job, lr))[0])


def round_second_moments(job: Job, lr: float) -> None:
    for one in job.optimizer.state.values():
        to_local(one["exp_avg_sq"]).copy_(to_local(one["exp_avg_sq"]).bfloat16())


def decay_frozen(job: Job, lr: float) -> None:
    for parameter in job.model.parameters():
        if not parameter.requires_grad:
            to_local(parameter.detach()).mul_(1 - lr * job.config.train.weight_decay)


WARM = "train.warmup_steps=3"
MUON2 = ("mesh.dp_shard=2", "train.optimizer=muon")

OPTIMIZER_FAULTS: dict[str, Fault] = {
    "betas exchanged": Fault(settings(beta1=0.95, beta2=0.9), SHARD2, ("the betas are exchanged",)),
    "the betas of PyTorch": Fault(settings(beta1=0.9, beta2=0.999), SHARD2, ("other betas",
        "beta2 = 0.999 instead of 0.95")),
    "another epsilon": Fault(settings(eps=1e-6), SHARD2, ("another epsilon", "eps = 1e-06 instead of 1e-08")),
    "the first moment is cleared": Fault(clearing("exp_avg"), SHARD2, ("the first moment is stale",)),
    "the second moment is cleared": Fault(clearing("exp_avg_sq"), SHARD2, ("the second moment is stale",)),
    "the optimizer's state is cleared": Fault(clearing("exp_avg", "exp_avg_sq"), SHARD2, ("both moments are stale",)),
    "weights are one step late": Fault(late_weights(1), SHARD2, ("use weights that are one step late",)),
    "weights are gathered once": Fault(late_weights(9), SHARD2, ("never see the updates: gathered weights are kept",)),
    "weights are left gathered": Fault(leave_gathered, SHARD2, ("weights left gathered: they are not resharded",
        "ranks 0 and 1 had a shard")),
    "decay in the gradient": Fault(decay_in_the_gradient, SHARD2, ("L2 regularisation",)),
    "second moments in bfloat16": Fault(after_update(round_second_moments), SHARD2,
        ("the second moment is kept in bfloat16 between steps",)),
    "frozen parameters decay": Fault(after_update(decay_frozen), (*SHARD2, "train.freeze=['embed*']"),
        ("frozen parameters decay",), "embed.weight"),
    "the count of updates is not kept": Fault(clearing("step"), SHARD2, ("it is 1 in every step",)),
    "momentum is dampened": Fault(dampened, (*SHARD2, "train.optimizer=sgd"), ("momentum is dampened",)),
    "three times the decay": Fault(on_groups(lambda job, one: replace(one, weight_decay=3 * one.weight_decay)), SHARD2,
        ("3.000 × the weight decay",)),
    "decay is missing": Fault(settings(weight_decay=0.0), SHARD2, ("weight decay is missing",)),
    "everything decays": Fault(decay_of_all, SHARD2, ("decay",), "norm.weight"),
    "twice the decay": Fault(on_groups(lambda job, one: replace(one, weight_decay=2 * one.weight_decay)), SHARD2,
        ("weight decay is applied", "twice")),
    "no clipping": Fault(scaling(lambda real: lambda parameters, factor: None), SHARD2, ("clipping is missing",)),
    "no clipping, where no step reaches the limit": Fault(scaling(lambda real: lambda parameters, factor: None),
        (*SHARD2, NOT_CLIPPED), ("clipping is missing",)),
    "clipping with an epsilon": Fault(scaling(lambda real: lambda parameters, factor: real(parameters,
        0.5 / (0.5 / factor + 1e-6))), SHARD2, ("an epsilon of 1e-06 added: the factor is limit / (norm + 1e-06)",)),
    "clipping by tensor": Fault(replacing(step_module, "scale_gradients", clip_each_tensor), SHARD2,
        ("the norm of each tensor",)),
    "clipping twice": Fault(scaling(lambda real: lambda parameters, factor: real(parameters, factor**2)), SHARD2,
        ("clipping is applied twice",)),
    "the rate of the step before": Fault(rates(lambda real: lambda number, train: real(max(1, number - 1), train)),
        (*SHARD2, WARM), ("the learning rate is one step behind",)),
    "no warm-up": Fault(rates(lambda real: lambda number, train: train.lr), (*SHARD2, WARM),
        ("the learning rate's schedule is missing", "3.000 × the right one")),
    "gradients are not cleared": Fault(wrapping("job.optimizer.zero_grad", lambda job, real: lambda: None), SHARD2,
        ("gradients are not cleared between steps",)),
}  # fmt: skip
MUON_FAULTS: dict[str, Fault] = {
    "each rank makes its own rows orthogonal": Fault(shards_alone, MUON2,
        ("each rank makes its own shard orthogonal, instead of the whole matrix",)),
    "momentum is not Nesterov's": Fault(another(PlainMomentum), MUON2, ("the momentum is not Nesterov's",)),
    "updates are not scaled": Fault(another(Unscaled), MUON2, ("not scaled by the larger side of its matrix",)),
    "momentum is cleared": Fault(another(Forgetful), MUON2, ("momentum is stale",)),
    "four iterations": Fault(another(FourIterations), MUON2, ("iterate once too little",)),
}  # fmt: skip
UNKNOWN_MUON_FAULTS: dict[str, Fault] = {
    "a neighbour's update": Fault(another(NeighboursUpdate), MUON2, ()),
    "matrices come back as they were": Fault(keep_momentum, MUON2, ()),
}
