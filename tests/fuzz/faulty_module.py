"""Modules that crash, hang or compute something else where there is more than one rank: faults that a run must show."""

from __future__ import annotations

import time

import torch.distributed as dist
from torch import Tensor

from meshwright.models.module.example import TinyGpt


class Faulty(TinyGpt):
    """A module with a fault on rank 1, in its forward."""

    def __init__(self, fault: str) -> None:
        super().__init__(width=16, depth=2)
        self.fault = fault

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the module, unless the fault prevents it."""
        logits = super().forward(ids)
        if not dist.is_initialized() or dist.get_rank() != 1:
            return logits
        if self.fault == "crash":
            raise ValueError("seeded")
        if self.fault == "hang":
            time.sleep(60)
        return logits * 1.1
