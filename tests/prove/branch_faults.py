"""Seeded faults that an ordinary step doesn't show: what must be skipped, and rates that are used later."""

from __future__ import annotations

import math
from types import SimpleNamespace

from meshwright.train import train_step as step_module
from meshwright.train.build_job import Job
from meshwright.train.train_step import TrainStep
from tests.prove.seeded_faults import HYBRID, SHARD2, Fault


def never_skip(job: Job, step: TrainStep) -> None:
    step_module.math = SimpleNamespace(isfinite=lambda value: True, sqrt=math.sqrt, nan=math.nan)


def look_at_the_loss_only(job: Job, step: TrainStep) -> None:
    """The norm's part of the decision is lost: it is called finite whatever it is."""
    real = step_module.local_squared_norm
    step_module.local_squared_norm = lambda *args, **kwargs: real(*args, **kwargs).nan_to_num(posinf=1.0)


def decide_alone(job: Job, step: TrainStep) -> None:
    """Each rank looks at its own loss: the total is made finite where the own one is."""
    real = step_module.all_reduce_sum

    def reduce(totals):
        is_finite = totals.isfinite().all()
        total = real(totals)
        return total.nan_to_num(nan=1.0, posinf=1.0) if is_finite else total

    step_module.all_reduce_sum = reduce


def decay_before_skipping(job: Job, step: TrainStep) -> None:
    """Weights decay in every step, skipped or not."""
    real = step.update

    def update(number, loss):
        result = real(number, loss)
        if result.skipped:
            for p in job.model.parameters():
                p.data.mul_(0.999)
        return result

    step.update = update  # type: ignore[method-assign]


BRANCH_FAULTS: dict[str, Fault] = {
    "steps are never skipped": Fault(never_skip, SHARD2,
        ("a step whose loss is not finite on rank 0 changes ranks 0 and 1", "must be skipped")),
    "the norm doesn't count": Fault(look_at_the_loss_only, SHARD2,
        ("a step whose gradient is not finite on rank 1 changes ranks 0 and 1",)),
    "each rank decides alone": Fault(decide_alone, HYBRID,
        ("a step whose loss is not finite on rank 0 changes ranks 1, 2 and 3", "must agree")),
    "a skipped step decays the weights": Fault(decay_before_skipping, SHARD2, ("changes ranks 0 and 1",)),
}  # fmt: skip
