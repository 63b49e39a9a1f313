"""Time linear layers in bfloat16 and float8 on a GPU, forward and backward."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

import torch
from torch import nn

from meshwright.features.float8.linear import AmaxHistory, Float8Linear
from meshwright.features.float8.run import convert_to_torchao
from meshwright.nn.linear import Linear
from meshwright_bench.alternate import alternate
from meshwright_bench.float8.cases import BFLOAT16, LAYERS, LayerTask


def measure(task: LayerTask) -> None:
    """Time all layers, and write seconds per side and round to the task's result file."""
    device = torch.device("cuda")
    found = {name: time_sides(*sizes, device=device, task=task) for name, sizes in LAYERS.items()}
    task.result.write_text(json.dumps(found), "utf-8")


def time_sides(
    num_tokens: int, width: int, features: int, *, device: torch.device, task: LayerTask
) -> dict[str, list[float]]:
    """Return seconds per forward and backward by side and round."""
    x = torch.randn(num_tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(num_tokens, features, device=device, dtype=torch.bfloat16)
    arms = {side: _step(layer, x, gradient) for side, layer in sides(width, features, device).items()}
    for arm in arms.values():
        arm()  # warm up
    timed = alternate(arms, timer=_seconds, rounds=task.rounds, steps=task.steps)
    return {side: list(values) for side, values in timed.seconds.items()}


def sides(width: int, features: int, device: torch.device) -> dict[str, nn.Module]:
    """Return the layer of each side, with the same weight."""
    plain = Linear(width, features).to(device, torch.bfloat16)
    current, delayed, cached = (Float8Linear.from_linear(copy.deepcopy(plain)) for _ in range(3))
    delayed.slots = AmaxHistory(1, length=16, device=device).slots(0)
    cached.refresh_cached_weight(cached.weight)
    torchao = nn.Sequential(copy.deepcopy(plain))
    convert_to_torchao(torchao, ("0",))
    return {BFLOAT16: plain, "current": current, "delayed": delayed, "cached": cached, "torchao": torchao}


def _step(layer: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> Callable[[], object]:
    def run() -> None:
        layer.zero_grad()
        x.grad = None
        layer(x).backward(gradient)

    return run


def _seconds(work: Callable[[], None]) -> float:
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
