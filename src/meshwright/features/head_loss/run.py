"""Head and loss by chunks on a rank: the head of the last stage is replaced by one that takes the targets.

A forward that computes the loss ends with the head: elementwise operators that follow are among the head's own.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from meshwright.errors import LayoutError
from meshwright.features.contract import RunFeature
from meshwright.features.head_loss.apply import LossHead
from meshwright.features.head_loss.plan import LossChunks
from meshwright.nn.linear import Linear
from meshwright.plan.run_plan import LayerSpec


class HeadLossInRuns(RunFeature):
    """Head and loss by chunks."""

    def before_styles(self, part: nn.Module, kind: LayerSpec) -> None:
        if (chunks := kind.part(LossChunks)) is None:
            return
        owner, _, name = chunks.head.rpartition(".")
        head = part.get_submodule(chunks.head)
        if type(head) is not Linear and type(head) is not nn.Linear:
            raise _refusal(f"{chunks.head} is {type(head).__module__}.{type(head).__name__}")
        for operator, _ in chunks.steps():
            if not _is_elementwise(operator):
                raise _refusal(f"{operator} is applied to what {chunks.head} returns")
        loss_head = LossHead.from_linear(head, chunks.tokens, chunks.steps())
        setattr(part.get_submodule(owner), name, loss_head)
        _end_with(loss_head, part)


def _refusal(what: str) -> LayoutError:
    return LayoutError(
        f"{what}, whose loss the plan takes by chunks",
        where="Family.describe, KindFacts.head",
        rule="the head is a linear layer, and what follows are elementwise operators of torch.ops.aten",
        fix="train.loss_chunk=0",
    )


def _is_elementwise(operator: str) -> bool:
    found = getattr(torch.ops.aten, operator, None)
    names = [] if found is None else found.overloads()
    return any(torch.Tag.pointwise in getattr(found, name).tags for name in names)


class _End(Exception):
    """Ends a forward with the loss."""

    def __init__(self, loss: Tensor) -> None:
        super().__init__()
        self.loss = loss


def _end_with(head: LossHead, part: nn.Module) -> None:
    """Let forwards of a stage that compute a loss return what its head does."""
    forward = part.forward

    @wraps(forward)
    def until_loss(*args: Any, **kwargs: Any) -> Any:
        if head.targets_bt is None:
            return forward(*args, **kwargs)
        handle = head.register_forward_hook(_raise)  # here, so that hooks of FSDP2 and of styles come before
        try:
            return forward(*args, **kwargs)
        except _End as end:
            return end.loss
        finally:
            handle.remove()

    part.forward = until_loss


def _raise(module: nn.Module, inputs: Any, loss: Tensor) -> NoReturn:
    raise _End(loss)


FEATURE = HeadLossInRuns()
