"""Measure the arms of `bench capture`: time of a step, graphs, and memory of their pools."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.capture.plan import CapturePlan
from meshwright.capture.run.capture import CaptureSession, Layers
from meshwright.nn.transformer_block import TokenContext
from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.alternate import alternate
from meshwright_bench.capture.cases import (
    CALLABLES,
    COMPILED,
    EAGER,
    PER_MICROBATCH,
    SEPARATE,
    SLOT,
    CaptureCase,
    CaptureTask,
)
from meshwright_bench.capture.rank_order import RankOrder


def measure(context: RankContext, task: CaptureTask) -> None:
    """Measure a case, and write its figures to the task's result file."""
    task.result.write_text(json.dumps(measure_case(task)), "utf-8")


def measure_case(task: CaptureTask) -> dict[str, Any]:
    """Return seconds per step and round by arm, seconds to capture, and graphs and memory by mode."""
    device, case = torch.device(task.device), task.case
    arms = {EAGER: RankOrder(case, device)}
    found: dict[str, Any] = {"graphs": {}, "static": {}, "pools": {}, "capture_s": {}}
    for mode in (SLOT, PER_MICROBATCH):
        arms[mode] = RankOrder(case, device)
        arms[mode].capture(case.scope, mode)
        session, begin = arms[mode].session, perf_counter()
        arms[mode].step()
        _wait(device)
        assert session is not None and session.plan is not None and session.runner is not None, "strict"
        found["capture_s"][mode] = perf_counter() - begin
        found["graphs"][mode] = len(session.plan.graphs)
        found["static"][mode] = session.plan.buffer_bytes
        found["pools"][mode] = session.runner.stats().pool_bytes
    found["pools"][SEPARATE] = _separate_pools(case, device)
    if device.type == "cuda":
        arms |= _other_arms(case, device)
    for arm in arms.values():
        arm.step()
    timed = alternate(
        {name: arm.step for name, arm in arms.items()},
        timer=lambda work: _seconds(work, device),
        rounds=task.rounds,
        steps=task.steps,
    )
    found["seconds"] = {name: list(values) for name, values in timed.seconds.items()}
    return found


def _separate_pools(case: CaptureCase, device: torch.device) -> int:
    """Return the memory of a pool per micro-batch, what capturing each micro-batch by itself would take."""
    order = RankOrder(case, device)
    order.capture(case.scope, PER_MICROBATCH, session=_InPoolsOfTheirOwn)
    order.step()
    assert order.session is not None and order.session.runner is not None
    return order.session.runner.stats().pool_bytes


class _InPoolsOfTheirOwn(CaptureSession):
    def plan_of(self, layers: Layers) -> CapturePlan:
        """Return the plan with a pool for each micro-batch."""
        plan = super().plan_of(layers)
        return replace(plan, graphs=tuple(replace(graph, pool=graph.instance) for graph in plan.graphs))


def _other_arms(case: CaptureCase, device: torch.device) -> dict[str, RankOrder]:
    """Return the arms of PyTorch; its callables have one graph a block, so they take one micro-batch at a time."""
    compiled = RankOrder(case, device)
    compiled.calls = [torch.compile(block) for block in compiled.blocks]
    arms = {COMPILED: compiled}
    if case.stages == 1 and case.scope == ("layer",):
        graphed = RankOrder(case, device)
        wrapped = tuple(map(_OnTensors, graphed.blocks, graphed.contexts))
        samples = tuple((torch.zeros_like(graphed.x, requires_grad=True),) for _ in wrapped)
        calls = torch.cuda.make_graphed_callables(wrapped, samples)
        graphed.calls = [lambda x, _, call=call: call(x) for call in calls]
        arms[CALLABLES] = graphed
    return arms


class _OnTensors(nn.Module):
    """A block that takes tensors only, as make_graphed_callables wants."""

    def __init__(self, block: nn.Module, context: TokenContext) -> None:
        super().__init__()
        self.block, self._context = block, context

    def forward(self, x: Tensor) -> Tensor:
        """Run the block."""
        out: Tensor = self.block(x, self._context)
        return out


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    _wait(device)
    begin = perf_counter()
    work()
    _wait(device)
    return perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
