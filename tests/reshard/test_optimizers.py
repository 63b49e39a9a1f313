"""Optimizers on strided and ordered layouts: steps equal to those on plain tensors."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshwright.reshard.fallback import replicate_fallback
from tests.helpers import quick_and_slow
from tests.reshard.placing import numbers, place


class MeansOfRowsAndColumns(torch.optim.Optimizer):
    """Like Adafactor (Shazeer and Stern 2018): of a matrix it keeps the mean square of each row and each column."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                square, state = p.grad.square() + 1e-8, self.state[p]
                if p.dim() < 2:
                    rms = square
                else:
                    for key, dim in (("rows", 1), ("columns", 0)):
                        mean = square.mean(dim)
                        state[key] = state[key].lerp(mean, 0.2) if key in state else mean
                    rms = torch.outer(state["rows"], state["columns"]) / state["rows"].mean()
                update = p.grad * rms.rsqrt()
                update = update / update.square().mean().sqrt().clamp(min=1.0)
                p.add_(update, alpha=-group["lr"])


OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1),
    "adamw one by one": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=False, amsgrad=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "means": MeansOfRowsAndColumns,
}
LAYOUTS = {
    "strided": ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    "strided, the other dim": ((2, 2), [_StridedShard(1, split_factor=2), Shard(1)]),
    "cut twice": ((2, 2), [Shard(0), Shard(0)]),
    "two dims": ((2, 2), [Shard(1), Shard(0)]),
    "one axis": ((2, 2), [Replicate(), Shard(0)]),
}


def loss(params):
    matrix, bias = params
    return (matrix.square().sum() + (matrix.sum(1) * bias).sum()) / 10


def trained(rank, world_size, name):
    """By layout: whether parameters and states are those of plain tensors, and what fell back."""
    found = {}
    for layout, (mesh_shape, placements) in LAYOUTS.items():
        mesh = init_device_mesh("cpu", mesh_shape)
        plain = [numbers(8, 12).requires_grad_(), numbers(8, seed=1).requires_grad_()]
        of_bias = [p if getattr(p, "dim", 0) == 0 else Replicate() for p in placements]
        placed = [
            place(x.detach(), mesh, p).requires_grad_() for x, p in zip(plain, (placements, of_bias), strict=True)
        ]
        with replicate_fallback(warn=False) as fallbacks:
            for params in (plain, placed):
                optimizer = OPTIMIZERS[name](params)
                for _ in range(3):
                    loss(params).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        same = [torch.allclose(a.full_tensor(), b, atol=1e-6) for a, b in zip(placed, plain, strict=True)]
        found[layout] = same, [list(x.placements) for x in placed] == [placements, of_bias], dict(fallbacks.counts)
    return found


@pytest.mark.parametrize("name", quick_and_slow(((name,) for name in OPTIMIZERS), {("adamw",), ("sgd",), ("means",)}))
def test_steps_are_those_on_plain_tensors(gang, name):
    for found in gang(4).run(trained, name):
        assert found == dict.fromkeys(LAYOUTS, ([True, True], True, {}))
