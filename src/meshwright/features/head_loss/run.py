"""Head and loss by chunks on a rank: the head of the last stage is replaced by one that takes the targets."""

from __future__ import annotations

from torch import nn

from meshwright.errors import LayoutError
from meshwright.features.contract import OnRank, RunFeature
from meshwright.features.head_loss.apply import LossHead
from meshwright.features.head_loss.plan import LossChunks
from meshwright.nn.linear import Linear
from meshwright.plan.run_plan import LayerSpec
from meshwright.train.build_job import Job
from meshwright.train.pipeline_stages import Pipeline


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

    def start(self, job: Job) -> OnRank:
        return HeadLossOnRank(job)


class HeadLossOnRank(OnRank):
    """The head of this rank, if it has the last stage."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def attach(self, pipeline: Pipeline) -> None:
        """Let the last stage give its head the targets."""
        for number, part in self._job.parts().items():
            for module in part.module.modules():
                if isinstance(module, LossHead):
                    pipeline.stages[number].computing_loss = module.of


FEATURE = HeadLossInRuns()
