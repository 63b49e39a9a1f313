"""Micro-batches of a plan, and of the same model built for real; and what of the plan's costs is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.features.head_loss.apply import LossHead
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.plan.make_plan import make_plan
from meshwright.plan.run_plan import LayerSpec, RunPlan
from meshwright.train.train_step import vocab_context
from meshwright_bench.recompute.live_bytes import inputs_of_last_block
from tests.models.real_costs import Measured
from tests.plan.costs import Costs
from tests.train.jobs import job_of, load_words, make_task


class MicroBatch:
    """A micro-batch of a plan, and of the same model built for real."""

    def __init__(
        self,
        words: Sequence[str],
        policy: RecomputePolicy,
        *,
        dtype: str = "float32",
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        words = [*words, f"recompute.policy={policy}"]
        job, step = job_of(load_words(words), rank, world_size)
        self.plan = without_windows(make_plan(load_words([*words, f"train.precision={dtype}"])))
        self._task, self.module = make_task(load_words(words)), job.parts()[0].module.to(getattr(torch, dtype))
        self._job = job
        batch = step.pipeline.tokens.localize(self._task.batch(range(self.plan.batch.samples)))
        self._inputs = [_cast(one, dtype) for one in (batch.inputs, *batch.conditions)]
        self._targets = batch.targets

    @property
    def block(self) -> LayerSpec:
        """The kind of the last block."""
        return self.plan.kind(self.plan.stages[0].kinds[-1])

    def of_model(self) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Passes of the model and its loss."""
        self.module.zero_grad(set_to_none=True)
        losses: list[Tensor] = []

        def forward() -> None:
            heads = [one.computing_loss_of(self._targets) for one in self.module.modules() if isinstance(one, LossHead)]
            with heads[0] if heads else nullcontext(), vocab_context(self._job):
                losses.append(self._task.loss_sum(self.module(*self._inputs), self._targets))

        def backward() -> None:
            with vocab_context(self._job):
                losses[0].backward()

        return forward, backward

    def of_block(self, *, trained: bool = True) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Passes of the last block."""
        block, inputs = inputs_of_last_block(self.module, *self._inputs)
        block.zero_grad(set_to_none=True)
        block.requires_grad_(trained)
        is_float = [isinstance(one, Tensor) and one.is_floating_point() for one in inputs]
        leaves = [one.detach().requires_grad_() if able else one for one, able in zip(inputs, is_float, strict=True)]
        outputs: list[Tensor] = []
        return lambda: outputs.append(block(*leaves)), lambda: outputs[0].backward(torch.ones_like(outputs[0]))


def _cast(value: Any, dtype: str) -> Any:
    return value.to(getattr(torch, dtype)) if isinstance(value, Tensor) and value.is_floating_point() else value


def without_windows(plan: RunPlan) -> RunPlan:
    """The plan without operations of attention with a window, an operator that `FlopCounterMode` can't look into."""

    def of_kind(kind: LayerSpec) -> LayerSpec:
        if kind.attention is None or kind.attention.mask.window is None:
            return kind
        return replace(kind, operators=tuple(replace(one, attention_flops=0) for one in kind.operators))

    return replace(plan, kinds=tuple(of_kind(kind) for kind in plan.kinds))


def wrong(costs: Costs, found: Measured) -> list[str]:
    """What of the costs is wrong: operations must be equal, kernels and bytes agree within a twentieth."""
    exact = [] if costs.flops == found.flops else ["flops"]
    pairs = {"launches": (costs.launches, found.launches), "num_bytes": (costs.num_bytes, found.num_bytes)}
    return exact + [name for name, (ours, real) in pairs.items() if ours != pytest.approx(real, rel=0.05)]
