"""Check updates: AdamW in float64 on the gradients that a rank recorded, from the parameters that it held.

Nothing but the rounding of the parameters' dtype may differ, whatever the precision of the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.config.facts_for_family import model_facts
from meshwright.config.schema import RunConfig, TrainConfig
from meshwright.optim.role import Role
from meshwright.prove.as_run.record_run import AsRunRecord
from meshwright.prove.compare.result import Diagnosis, FaultKind

WEIGHT_ROUNDINGS, STEP_ROUNDINGS = 8.0, 128.0
"""Rounding errors of a parameter, and of the terms of its step relative to the learning rate."""


TINY = 1e-38
"""Smallest error that counts: float32 has no smaller normal numbers."""


@dataclass(frozen=True)
class Rule:
    """Optimizer step, as configured or with a known fault."""

    what: str = ""
    """The fault, as a symptom and a cause."""
    cause: str = ""
    kind: FaultKind = FaultKind.STEP_SCALED
    lr: float = 1.0
    """Factor on the learning rate."""
    clips: bool = True
    matrix_decay: float = 1.0
    """Factor on the weight decay of matrices."""
    vector_decay: float = 0.0
    corrects_bias: bool = True
    keeps_moments: bool = True
    swaps_betas: bool = False


RIGHT = Rule()
NEVER = Rule("never updated", "the optimizer skipped it", FaultKind.NOT_UPDATED, lr=0.0)
FAULTS = (
    NEVER,
    Rule("updated by 2.000 × the step", "2 times the learning rate", lr=2.0),
    Rule("updated by 0.500 × the step", "half the learning rate", lr=0.5),
    Rule("updated with gradients that are not clipped", "clipping is skipped", clips=False),
    Rule("updated without weight decay", "weight decay is missing", FaultKind.WEIGHT_DECAY, matrix_decay=0.0),
    Rule("updated with 2.000 × the weight decay", "weight decay twice", FaultKind.WEIGHT_DECAY, matrix_decay=2.0),
    Rule("updated with weight decay", "vectors such as norm weights don't decay", FaultKind.WEIGHT_DECAY,
         vector_decay=1.0),
    Rule("updated with biased moments", "AdamW's bias correction is missing", corrects_bias=False),
    Rule("updated as in the first step", "the moments of earlier steps are lost", keeps_moments=False),
    Rule("updated with β1 and β2 exchanged", "the betas are exchanged", swaps_betas=True),
)  # fmt: skip


def expected_lr(step: int, train: TrainConfig) -> float:
    """Return the learning rate of a step in closed form, independently of the trainer's schedule."""
    low = train.lr * train.min_lr_ratio
    if step <= train.warmup_steps:
        return step / train.warmup_steps * train.lr
    left = train.steps - step
    if train.lr_schedule == "wsd":
        return low + (train.lr - low) * min(1.0, max(0.0, left / train.decay_steps) if train.decay_steps else 1.0)
    whole = max(1, train.steps - train.warmup_steps)
    return low + (train.lr - low) * math.cos(math.pi / 2 * min(1.0, (step - train.warmup_steps) / whole)) ** 2


def update_errors(record: AsRunRecord, name: str, config: RunConfig, rule: Rule = RIGHT) -> Iterator[float]:
    """Yield the error of each step's update of a rank's shard, relative to what rounding can do."""
    train, first, second = config.train, None, None
    is_vector = any(key == name and one.role is Role.VECTOR for key, one in model_facts(config).named_parameters())
    for step in range(1, len(record.steps) + 1):
        found = record.step(step)
        old, new = (record.weights[at][name][1] for at in (step - 1, step))
        if not old.numel():
            yield 0.0
            continue
        unit = torch.finfo(old.dtype).eps
        if name not in found.gradients or found.skipped:
            yield 0.0 if torch.equal(old, new) else math.inf
            continue
        clip = min(1.0, train.max_grad_norm / found.grad_norm) if rule.clips else 1.0
        g = found.gradients[name][1].double() * clip
        beta1, beta2 = (train.beta2, train.beta1) if rule.swaps_betas else (train.beta1, train.beta2)
        if first is None or second is None or not rule.keeps_moments:
            first, second = torch.zeros_like(g), torch.zeros_like(g)
        first, second = beta1 * first + (1 - beta1) * g, beta2 * second + (1 - beta2) * g * g
        ones = (1.0, 1.0) if not rule.corrects_bias else (1 - beta1**step, 1 - beta2**step)
        lr = expected_lr(step, train) * rule.lr
        is_matrix = old.dim() >= 2 and not is_vector
        decay = train.weight_decay * (rule.matrix_decay if is_matrix else rule.vector_decay)
        due = old.double() * (1 - lr * decay) - lr * (first / ones[0]) / ((second / ones[1]).sqrt() + train.eps)
        yield _largest(new.double(), due, unit, lr=lr, weights=old.double())


def _largest(new: Tensor, due: Tensor, unit: float, *, lr: float, weights: Tensor) -> float:
    limit = unit * (WEIGHT_ROUNDINGS * (weights.abs() + due.abs()) + STEP_ROUNDINGS * lr) + TINY
    worst = float(((new - due).abs() / limit).max())
    return worst if worst == worst else math.inf


def diagnose_updates(records: list[AsRunRecord], wrong: list[tuple[int, str]], config: RunConfig) -> Diagnosis:
    """Return the cause that explains all wrong updates, given as rank and parameter."""
    for rule in FAULTS:
        if all(max(update_errors(records[rank], name, config, rule)) <= 1.0 for rank, name in wrong):
            return Diagnosis(rule.kind, rule.what, rule.cause)
    return Diagnosis(FaultKind.UNRECOGNISED, "not updated by AdamW on its gradient", "not recognised")
