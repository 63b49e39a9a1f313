"""Head and cross-entropy of all tokens at once, and by chunks: bytes that live, gradients, and times."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import RunError
from meshwright.features.head_loss.apply import LossHead
from meshwright.models.tasks.next_token import cross_entropy_sum
from meshwright.nn.linear import Linear
from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.alternate import alternate
from meshwright_bench.loss.cases import ALL, LossTask
from meshwright_bench.private import LiveBytes
from meshwright_bench.train.measure import timer_on

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2}
"""Largest relative difference between the gradients of both sides, by the norm."""


def measure_loss(context: RankContext, task: LossTask) -> None:
    """Measure all sides, and write bytes and seconds as JSON."""
    task.result.write_text(json.dumps(all_sides(task)), "utf-8")


def all_sides(task: LossTask) -> dict[str, Any]:
    """Return peak live bytes, bytes of the largest tensor, and seconds by round of each side.

    Raises:
        RunError: the gradients of two sides differ.
    """
    torch.manual_seed(0)
    dtype = getattr(torch, task.dtype)
    hidden = torch.randn(1, task.tokens, task.width).to(dtype).requires_grad_()
    targets = torch.randint(task.vocabulary, (1, task.tokens))
    plain = Linear(task.width, task.vocabulary).to(dtype)
    heads: dict[str, Linear] = {ALL: plain}
    heads |= {f"chunk_{chunk}": LossHead.from_linear(plain, chunk) for chunk in task.chunks}
    arms = {name: partial(loss_and_gradients, head, hidden, targets) for name, head in heads.items()}
    right = arms[ALL]()[1]
    peaks, largest = {}, {}
    for name, arm in arms.items():
        with LiveBytes() as live:
            found = arm()[1]
        peaks[name], largest[name] = live.peak, live.largest
        apart = max(float((a - b).norm() / b.norm()) for a, b in zip(found, right, strict=True))
        if not apart <= TOLERANCE[task.dtype]:
            raise RunError(f"gradients of {name} differ by {apart:.1e} from those of all logits", where="bench loss")
        del found
    timed = alternate(arms, timer=timer_on(torch.device("cpu")), rounds=task.rounds, steps=task.steps)
    return {"peak": peaks, "largest": largest, "seconds": timed.seconds}


def loss_and_gradients(head: Linear, hidden: Tensor, targets: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the mean loss, and the gradients of the hidden states and of the head's weight."""
    if isinstance(head, LossHead):
        with head.computing_loss_of(targets):
            loss = head(hidden)
    else:
        loss = cross_entropy_sum(head(hidden), targets)
    loss = loss / targets.numel()
    return loss.detach(), torch.autograd.grad(loss, (hidden, head.weight))
