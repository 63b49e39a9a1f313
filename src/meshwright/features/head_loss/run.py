"""Head and loss by chunks on a rank: the head of the last stage is replaced by one that takes the targets."""

from __future__ import annotations

from torch import nn

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
            raise LayoutError(
                f"{chunks.head} is {type(head).__module__}.{type(head).__name__}, whose loss the plan takes by chunks",
                where="Family.describe, KindFacts.head",
                rule="the head is a linear layer without further computation",
                fix="train.loss_chunk=0",
            )
        setattr(part.get_submodule(owner), name, LossHead.from_linear(head, chunks.tokens))


FEATURE = HeadLossInRuns()
