"""Bytes that context parallelism sends in training steps, predicted before they ran and from their documents."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from meshwright.nn.attention.mask_spec import Documents
from meshwright.nn.attention.token_layout import TokenLayout
from meshwright.parallel.context.heads import HeadsAttention
from meshwright.parallel.context.ring import RingAttention
from meshwright.plan.collective_bytes import Purpose, context_bytes
from meshwright.plan.context.sent_bytes import sent_by_attention
from meshwright.plan.run_plan import Stage
from meshwright.train.build_job import Job


class ContextTraffic:
    """Predictions of what this rank's attention sends."""

    purpose = Purpose.CONTEXT

    def __init__(self, job: Job) -> None:
        self._plan, self._rank = job.plan, job.context.rank
        self.basis = "documents" if job.plan.batch.packed else ""
        cores = (getattr(module, "core", None) for module in job.model.modules())
        self.groups: set[ProcessGroup] = {c.group for c in cores if isinstance(c, RingAttention | HeadsAttention)}
        self._in_step, self._explained = False, 0
        for part in job.parts().values() if self.groups and self._plan.batch.packed else ():
            part.module.register_forward_pre_hook(self._hook(part.stage))

    def start_step(self) -> None:
        """Prepare for a step."""
        self._in_step = True

    def end_step(self) -> None:
        """Finish a step."""
        self._in_step = False

    def predicted(self, num_steps: int) -> int:
        """Return the bytes of so many steps, as if each sample were one document."""
        return num_steps * context_bytes(self._plan, self._rank)

    def explained(self, num_steps: int) -> int:
        """Return the bytes of the steps that ran, as their documents imply."""
        return self._explained if self._plan.batch.packed else self.predicted(num_steps)

    def _hook(self, stage: Stage) -> Any:
        def add(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            layout = next((one for one in inputs if isinstance(one, TokenLayout)), None)
            if self._in_step and layout is not None:
                self._explained += self._sent(stage, layout.documents)

        return add

    def _sent(self, stage: Stage, documents: Documents | None) -> int:
        """Return the bytes of a micro-batch on a stage."""
        return sum(
            layers * num_bytes
            for name, layers in Counter(stage.kinds).items()
            for _, num_bytes in sent_by_attention(self._plan, self._rank, self._plan.kind(name), documents)
        )
