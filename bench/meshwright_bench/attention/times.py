"""Time attention under masks, by each backend that runs on the device.

On a CPU, times are the thread's processor time, so that waiting for a core that other jobs use is on neither side.

Shapes: b batch, s tokens, n heads, h head_dim.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import RunError
from meshwright.nn.attention.attention import attention
from meshwright.nn.attention.attention_mask import AttentionMask
from meshwright.nn.attention.backend import AttentionRequest, Backend
from meshwright_bench.alternate import Timer, Work, alternate
from meshwright_bench.attention.cases import MASKS, AttentionTask, Pass
from meshwright_bench.benchmarks import Benchmark
from meshwright_bench.train.measure import timer_on


def measure_attention(task: AttentionTask) -> None:
    """Measure and write seconds as JSON."""
    task.result.write_text(json.dumps({timed: time_pass(task, timed) for timed in Pass}), "utf-8")


def time_pass(task: AttentionTask, timed: Pass) -> dict[str, Any]:
    """Return the seconds per round of every arm.

    Raises:
        RunError: a backend's result is wrong.
    """
    torch.manual_seed(0)
    device, dtype = torch.device(task.device), getattr(torch, task.dtype)
    shape = (1, task.seq_len, task.num_heads, task.head_dim)
    q, k, v, grad = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    inputs = [x.requires_grad_(timed is Pass.BOTH) for x in (q, k, v)]
    arms: dict[str, Callable[[], object]] = {}
    for backend, name in task.arms(timed):
        request = AttentionRequest(task.device, task.dtype, needs_grad=False)
        mask = AttentionMask(MASKS[name], task.seq_len, device=device, backend=backend, request=request)
        _check(inputs, mask, name)
        arms[f"{backend}.{name}"] = _arm(inputs, mask, grad if timed is Pass.BOTH else None)
    for arm in arms.values():
        arm()
    return dict(alternate(arms, timer=_timer(device), rounds=task.rounds, steps=task.steps).seconds)


def _arm(inputs: list[Tensor], mask: AttentionMask, grad: Tensor | None) -> Callable[[], object]:
    def run() -> object:
        out = attention(*inputs, mask=mask)
        return out if grad is None else torch.autograd.grad(out, inputs, grad)

    return run


@torch.no_grad()
def _check(inputs: list[Tensor], mask: AttentionMask, name: str) -> None:
    """Compare one head with the reference."""
    spec = MASKS[name]
    found = attention(*inputs, mask=mask)[:, :, :1]
    expected = attention(*(x[:, :, :1] for x in inputs), mask=spec, backend=Backend.REFERENCE)
    difference = (found - expected).abs().max().item()
    if difference > (1e-4 if found.dtype == torch.float32 else 5e-2):
        raise RunError(
            f"{mask.backend} differs from the reference by {difference:g} under the {name} mask",
            where=f"bench {Benchmark.ATTENTION}",
            rule="a benchmark of a wrong result is meaningless",
            fix="this is a bug: please report it with this message",
        )


def _timer(device: torch.device) -> Timer:
    return timer_on(device) if device.type == "cuda" else _processor_seconds


def _processor_seconds(work: Work) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start
