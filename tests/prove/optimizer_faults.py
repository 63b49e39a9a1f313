"""Seeded faults of clipping, learning rates, AdamW and Muon: the gradients are right, and the cause must be named."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FSDPModule

from meshwright.comm.collectives import all_reduce_sum
from meshwright.mesh.local_shards import to_local
from meshwright.optim.catalogue import COEFFICIENTS, SGD, TINY, Muon
from meshwright.train import train_step as step_module
from meshwright.train.optimizer import local_squared_norm, scale_gradients
from tests.prove.seeded_faults import SHARD2, Fault, each, giving, replacing, settings, taking, wrapping

NOT_CLIPPED = "train.max_grad_norm=100.0"
"""A limit that no step reaches by itself."""


def with_settings(**others):
    return settings(lambda job, one: others)


def scaling(change):
    """Scale gradients by `change(job, factor)`, where they are clipped."""
    return replacing(step_module, "scale_gradients", taking(lambda job, ps, factor: (ps, change(job, factor))))


def before_update(change):
    return wrapping("job.optimizer.step", taking(lambda job, lr: (change(job, lr), (lr,))[1]))


def clearing(*states):
    """States of the optimizer are lost before each step."""
    return before_update(
        lambda job, lr: [one[name].zero_() for one in job.optimizer.state.values() for name in {*states} & {*one}]
    )


def clip_groups(job, real):
    """Each of the optimizer's groups is clipped by its own norm."""

    def optimize(lr, grad_norm):
        for group in job.optimizer.groups:
            members = [member.parameter for member in group.members]
            norm = all_reduce_sum(local_squared_norm(members, num_ranks=job.axes.num_ranks())).sqrt().item()
            scale_gradients(members, min(1.0, job.config.train.max_grad_norm / norm))
        job.optimizer.step(lr)

    return optimize


def late_weights(steps):
    """Forward and backward use weights that are late by some steps, and the update those that it should."""

    def change(job, real):
        versions, held = [], [to_local(parameter.detach()) for parameter in job.model.parameters()]

        def accumulate(number):
            versions.append([x.clone() for x in held])
            torch._foreach_copy_(held, versions[max(0, len(versions) - 1 - steps)])
            loss = real(number)
            torch._foreach_copy_(held, versions[-1])
            return loss

        return accumulate

    return wrapping("step.accumulate", change)


def decay_in_the_gradient(job, step):
    decays = [(one.parameter, group.settings.weight_decay) for group in job.optimizer.groups for one in group.members]
    added = before_update(lambda job, lr: [to_local(p.grad).add_(to_local(p.detach()), alpha=d) for p, d in decays])
    for tamper in (with_settings(weight_decay=0.0), added):
        tamper(job, step)


def clip_each_tensor(job, real):
    limit = job.config.train.max_grad_norm
    return lambda ps, factor: [real([p], min(1.0, limit / float(p.grad.full_tensor().norm()))) for p in ps] and None


def round_second_moments(job, lr):
    for one in job.optimizer.state.values():
        to_local(one["exp_avg_sq"]).copy_(to_local(one["exp_avg_sq"]).bfloat16())


def decay_frozen(job, lr):
    for parameter in job.model.parameters():
        if not parameter.requires_grad:
            to_local(parameter.detach()).mul_(1 - lr * job.config.train.weight_decay)


# ---- Muon and SGD


def method(optimizer, name, change):
    """Replace `optimizer.name(self, …)` by `change(…)`, of its other arguments."""
    return replacing(optimizer, name, lambda job, real: lambda one, *given: change(*given))


def four_iterations(matrices):
    a, b, c = COEFFICIENTS
    x = matrices / (matrices.square().sum((-2, -1), keepdim=True).sqrt() + TINY)
    for _ in range(4):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x


def dampened(slots, settings):
    for slot in slots:
        momentum = slot.state["momentum"].mul_(settings.momentum).add_(slot.gradient, alpha=1 - settings.momentum)
        slot.parameter.mul_(1 - settings.lr * settings.weight_decay).add_(momentum, alpha=-settings.lr)


def plain_momentum(slot, settings):
    return slot.state["momentum"].mul_(settings.momentum).add_(slot.gradient).clone()


def shards_alone(job, real):
    """Each rank makes its own shard orthogonal."""
    return lambda slots: [Muon().update([slot], settings) for slot, settings in slots.values()] and None


REPLACED = (Muon, SGD)
WARM = "train.warmup_steps=3"
MUON2 = ("mesh.dp_shard=2", "train.optimizer=muon")

OPTIMIZER_FAULTS: dict[str, Fault] = {
    "betas exchanged": Fault(with_settings(beta1=0.95, beta2=0.9), SHARD2, ("the betas are exchanged",)),
    "the betas of PyTorch": Fault(with_settings(beta1=0.9, beta2=0.999), SHARD2, ("other betas",
        "beta2 = 0.999 instead of 0.95")),
    "another epsilon": Fault(with_settings(eps=1e-6), SHARD2, ("another epsilon", "eps = 1e-06 instead of 1e-08")),
    "the first moment is cleared": Fault(clearing("exp_avg"), SHARD2, ("the first moment is stale",)),
    "the second moment is cleared": Fault(clearing("exp_avg_sq"), SHARD2, ("the second moment is stale",)),
    "the optimizer's state is cleared": Fault(clearing("exp_avg", "exp_avg_sq"), SHARD2, ("both moments are stale",)),
    "weights are one step late": Fault(late_weights(1), SHARD2, ("use weights that are one step late",)),
    "weights are gathered once": Fault(late_weights(9), SHARD2, ("never see the updates: gathered weights are kept",)),
    "weights are left gathered": Fault(each(FSDPModule, lambda job, unit: unit.set_reshard_after_backward(False)),
        SHARD2, ("weights left gathered: they are not resharded", "ranks 0 and 1 had a shard")),
    "decay in the gradient": Fault(decay_in_the_gradient, SHARD2, ("L2 regularisation",)),
    "second moments in bfloat16": Fault(before_update(round_second_moments), SHARD2,
        ("the second moment is kept in bfloat16 between steps",)),
    "frozen parameters decay": Fault(before_update(decay_frozen), (*SHARD2, "train.freeze=['embed*']"),
        ("frozen parameters decay",), "embed.weight"),
    "the count of updates is not kept": Fault(clearing("step"), SHARD2, ("it is 1 in every step",)),
    "momentum is dampened": Fault(method(SGD, "update", dampened), (*SHARD2, "train.optimizer=sgd"),
        ("momentum is dampened",)),
    "three times the decay": Fault(settings(lambda job, one: {"weight_decay": 3 * one.weight_decay}), SHARD2,
        ("3.000 × the weight decay",)),
    "decay is missing": Fault(with_settings(weight_decay=0.0), SHARD2, ("weight decay is missing",)),
    "twice the decay": Fault(settings(lambda job, one: {"weight_decay": 2 * one.weight_decay}), SHARD2,
        ("weight decay is applied", "twice")),
    "no clipping": Fault(scaling(lambda job, factor: 1.0), SHARD2, ("clipping is missing",)),
    "no clipping, where no step reaches the limit": Fault(scaling(lambda job, factor: 1.0),
        (*SHARD2, NOT_CLIPPED), ("clipping is missing",)),
    "clipping with an epsilon": Fault(scaling(lambda job, factor: 0.5 / (0.5 / factor + 1e-6)), SHARD2,
        ("an epsilon of 1e-06 added: the factor is limit / (norm + 1e-06)",)),
    "clipping by tensor": Fault(replacing(step_module, "scale_gradients", clip_each_tensor), SHARD2,
        ("the norm of each tensor",)),
    "clipping twice": Fault(scaling(lambda job, factor: factor**2), SHARD2, ("clipping is applied twice",)),
    "the rate of the step before": Fault(replacing(step_module, "learning_rate", taking(lambda job, number, train:
        (max(1, number - 1), train))), (*SHARD2, WARM), ("the learning rate is one step behind",)),
    "the schedule counts micro-batches": Fault(replacing(step_module, "learning_rate", taking(lambda job, number, train:
        (2 * number, train))), (*SHARD2, WARM, "train.num_microbatches=2"), ("the schedule counts micro-batches: 2",)),
    "groups are clipped apart": Fault(wrapping("step._optimize", clip_groups), (*SHARD2,
        "train.parameter_groups=['embedding:lr=0.02']"), ("the norm of each group of parameters", "embedding;")),
    "no warm-up": Fault(replacing(step_module, "learning_rate", giving(lambda job, rate: job.config.train.lr)),
        (*SHARD2, WARM), ("the learning rate's schedule is missing", "3.000 × the right one")),
    "gradients are not cleared": Fault(wrapping("job.optimizer.zero_grad", lambda job, real: lambda: None), SHARD2,
        ("gradients are not cleared between steps",)),
}  # fmt: skip
MUON_FAULTS: dict[str, Fault] = {
    "each rank makes its own rows orthogonal": Fault(wrapping("job.optimizer._owners.run", shards_alone), MUON2,
        ("each rank makes its own shard orthogonal, instead of the whole matrix",)),
    "momentum is not Nesterov's": Fault(method(Muon, "prepare", plain_momentum), MUON2,
        ("the momentum is not Nesterov's",)),
    "updates are not scaled": Fault(replacing(Muon, "apply", taking(lambda job, one, slot, update, settings: (one, slot,
        update / max(slot.shape) ** 0.5, settings))), MUON2, ("not scaled by the larger side of its matrix",)),
    "momentum is cleared": Fault(clearing("momentum"), MUON2, ("momentum is stale",)),
    "four iterations": Fault(method(Muon, "transform", four_iterations), MUON2, ("iterate once too little",)),
}  # fmt: skip
UNKNOWN_MUON_FAULTS: dict[str, Fault] = {
    "a neighbour's update": Fault(replacing(Muon, "transform", giving(lambda job, found: found.roll(1, 0))), MUON2, ()),
    "matrices come back as they were": Fault(method(Muon, "transform", lambda matrices: matrices), MUON2, ()),
}  # fmt: skip
