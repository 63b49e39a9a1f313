"""A family whose head computes a loss of its own: the documented example, with a z-loss of logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from parallel_gpt.family import Gpt
from torch import Tensor

from meshwright.models.contract.family import RunFacts
from meshwright.models.contract.model_facts import HeadFacts, ModelFacts, Part
from meshwright.models.tasks.next_token import cross_entropy_sum
from meshwright.models.tasks.text_task import text_reference
from meshwright.nn.linear import Linear

WEIGHT = 0.01


def with_z_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of cross-entropies and of squared normalizers."""
    return cross_entropy_sum(logits, targets) + WEIGHT * logits.logsumexp(-1).square().sum()


class OwnHead(Linear):
    """A head that returns logits or, within a context, the sum of losses."""

    targets: Tensor | None = None

    @contextmanager
    def computing_loss_of(self, targets: Tensor) -> Iterator[None]:
        self.targets = targets
        try:
            yield
        finally:
            self.targets = None

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return logits if self.targets is None else with_z_loss(logits, self.targets)


class Own(Gpt):
    def describe(self, f: RunFacts) -> ModelFacts:
        facts = super().describe(f)
        return replace(facts, last=tuple(replace(end, head=HeadFacts()) for end in facts.last))

    def build(self, f: RunFacts, part: Part) -> Any:
        module = super().build(f, part)
        if part.is_last:
            with torch.device("meta"):
                module.head = OwnHead(module.head.in_features, module.head.out_features)
        return module

    def reference(self, f: RunFacts, data: Any) -> Any:
        return text_reference(f, data, with_z_loss)
