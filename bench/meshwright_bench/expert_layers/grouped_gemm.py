"""Grouped matrix products of experts on a CUDA device: forward and weight gradient.

Shapes: r rows, e groups, d input width, f output width.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.nn.experts.grouped_linear import RowGroups, multiply, weight_gradient
from meshwright_bench.alternate import alternate
from meshwright_bench.expert_layers.cases import FORWARD, WEIGHT_GRADIENT, GroupedTask
from meshwright_bench.train.measure import timer_on

DTYPE = torch.bfloat16


def measure_grouped(task: GroupedTask) -> None:
    """Measure and write seconds as JSON."""
    task.result.write_text(json.dumps(grouped_seconds(task)), "utf-8")


@torch.no_grad()
def grouped_seconds(task: GroupedTask) -> dict[str, Any]:
    """Measure the seconds per round, with rows spread at random over the groups."""
    device = torch.device(task.device)
    torch.manual_seed(0)
    x_rd = torch.randn(task.num_rows, task.dim, device=device).to(DTYPE)
    gradient_rf = torch.randn(task.num_rows, task.width, device=device).to(DTYPE)
    weight_edf = torch.randn(task.num_groups, task.dim, task.width, device=device).to(DTYPE)
    sizes_e = torch.randint(task.num_groups, (task.num_rows,), device=device).bincount(minlength=task.num_groups)
    groups = RowGroups(sizes_e, sizes_e.tolist())
    arms: dict[str, Callable[[], Tensor]] = {
        FORWARD: lambda: multiply(x_rd, weight_edf, groups),
        WEIGHT_GRADIENT: lambda: weight_gradient(gradient_rf, x_rd, groups),
    }
    for arm in arms.values():
        arm()
    timed = alternate(arms, timer=timer_on(device), rounds=task.rounds, steps=task.steps)
    return {"seconds": timed.seconds, "flops": task.flops()}
