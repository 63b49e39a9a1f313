"""Seeded faults that an ordinary step doesn't show: what must be skipped, and rates that are used later."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from meshwright.train import train_step as step_module
from meshwright.train.build_job import Job
from tests.prove.seeded_faults import HYBRID, SHARD2, Fault, replacing, wrapping


def always_finite(job: Job, real: Any) -> Any:
    return SimpleNamespace(isfinite=lambda value: True, sqrt=math.sqrt, nan=math.nan)


def finite_norm(job: Job, real: Any) -> Any:
    """The norm's part of the decision is lost: it is called finite whatever it is."""
    return lambda *args, **kwargs: real(*args, **kwargs).nan_to_num(posinf=1.0)


def own_decision(job: Job, real: Any) -> Any:
    """Each rank looks at its own loss: the total is made finite where the own one is."""

    def reduce(totals: Any) -> Any:
        is_finite = totals.isfinite().all()
        total = real(totals)
        return total.nan_to_num(nan=1.0, posinf=1.0) if is_finite else total

    return reduce


def decay_if_skipped(job: Job, real: Any) -> Any:
    """Weights decay in every step, skipped or not."""

    def update(number: int, loss: Any) -> Any:
        result = real(number, loss)
        for p in job.model.parameters() if result.skipped else ():
            p.data.mul_(0.999)
        return result

    return update


def kept_if_skipped(job: Job, real: Any) -> Any:
    """A skipped step goes on before gradients are cleared."""
    ran: list[float] = []
    step = job.optimizer.step
    job.optimizer.step = lambda lr: ran.append(lr) or step(lr)  # type: ignore[method-assign]

    def clear() -> None:
        if ran:
            real()
        ran.clear()

    return clear


def always_counts(job: Job, real: Any) -> Any:
    """The experts' tokens of a skipped step are counted."""
    return lambda *, applied: real(applied=True)


BRANCH_FAULTS: dict[str, Fault] = {
    "steps are never skipped": Fault(
        replacing(step_module, "math", always_finite),
        SHARD2,
        ("a step whose loss is not finite on rank 0 changes ranks 0 and 1", "must be skipped"),
    ),
    "the norm doesn't count": Fault(
        replacing(step_module, "local_squared_norm", finite_norm),
        SHARD2,
        ("a step whose gradient is not finite on rank 1 changes ranks 0 and 1",),
    ),
    "each rank decides alone": Fault(
        replacing(step_module, "all_reduce_sum", own_decision),
        HYBRID,
        ("a step whose loss is not finite on rank 0 changes ranks 1, 2 and 3", "must agree"),
    ),
    "a skipped step decays the weights": Fault(
        wrapping("step.update", decay_if_skipped), SHARD2, ("changes ranks 0 and 1", "parameters change, but no moment")
    ),
    "a skipped step keeps its gradients": Fault(
        wrapping("job.optimizer.zero_grad", kept_if_skipped),
        SHARD2,
        ("changes ranks 0 and 1", "gradients are not cleared"),
    ),
}
"""Of any model."""
EXPERT_BRANCH_FAULTS: dict[str, Fault] = {
    "a skipped step counts its experts' tokens": Fault(wrapping("step._handles.end_step", always_counts), SHARD2,
        ("changes ranks 0 and 1", "enter buffers")),
    "ranks with experts decide alone": Fault(replacing(step_module, "all_reduce_sum", own_decision), SHARD2,
        ("a step whose loss is not finite on rank 0 changes rank 1", "must agree")),
}  # fmt: skip
