"""A loss of one's own for each token, in place of cross-entropy.

Shapes: b batch, t time, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.data.loader import IGNORED_TARGET
from meshwright.errors import ConfigError
from meshwright.models.contract.loss_unit import LossUnit
from meshwright.models.tasks.next_token import OwnLoss
from meshwright.settings.import_object import import_object

KEY = "model.loss"
RULE = "model.loss takes logits [b, t, v] and targets [b, t], and returns the loss of each token, [b, t]"


@lru_cache(maxsize=8)
def own_loss(name: str) -> OwnLoss | None:
    """Return the loss that `model.loss` names, or None for cross-entropy.

    Raises:
        ConfigError: there is no such function.
    """
    if not name:
        return None
    loss = import_object(name, key=KEY, rule=RULE, format_setting=lambda found: f"{KEY}={found}")
    return OwnLoss(summed(loss, name), LossUnit("per token"))


def summed(loss: Callable[[Tensor, Tensor], Tensor], name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that sums a loss over the tokens that have a target.

    Args:
        loss: returns each token's loss, given logits and targets; a token without a target has target 0.
        name: name of the loss, for errors.
    """

    def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
        if isinstance(logits, DTensor):  # a head sharded over the vocabulary
            logits = logits.full_tensor()
        counted = targets != IGNORED_TARGET
        losses = loss(logits, targets.where(counted, 0))
        if losses.shape != targets.shape:
            what = f"{name} returns a tensor {list(losses.shape)} for targets {list(targets.shape)}"
            raise ConfigError(what, where=KEY, rule=RULE, fix='reduction="none" in the loss')
        losses = losses.float() if losses.dtype in (torch.bfloat16, torch.float16) else losses
        return losses.where(counted, 0).sum()

    return loss_sum
