"""Optimizers on strided and ordered layouts: steps equal to those on plain tensors."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshwright.dtensor_ops.fallback import replicate_fallback
from meshwright.dtensor_ops.operator_context import for_dtensor
from meshwright.reshard.dtensor.placements import layout_of
from meshwright.reshard.dtensor.redistribute import redistribute
from tests.reshard.placing import numbers, place

MANY_S = 120
"""Timeout for bodies of many operators, which take seconds, and ten times as long on a loaded machine."""


class MeansOfRowsAndColumns(torch.optim.Optimizer):
    """An optimizer like Adafactor (Shazeer and Stern 2018), which keeps mean squares of matrix rows and columns."""

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
    "strided": ([_StridedShard(0, split_factor=2), Shard(0)], None),
    "strided, the other dim": ([_StridedShard(1, split_factor=2), Shard(1)], None),
    "cut twice": ([Shard(0), Shard(0)], None),
    "cut twice, the second axis first": ([Shard(0), Shard(0)], {0: (1, 0)}),
    "columns cut twice, the second axis first": ([Shard(1), Shard(1)], {1: (1, 0)}),
    "two dims": ([Shard(1), Shard(0)], None),
    "one axis": ([Replicate(), Shard(0)], None),
}
CONTEXTS = {"for_dtensor": lambda: for_dtensor(), "replicate_fallback": lambda: replicate_fallback(warn="error")}


def loss(params):
    matrix, bias = params
    return (matrix.square().sum() + (matrix.sum(1) * bias).sum()) / 10


def trained(rank, world_size, name, context, layouts):
    """Compare, by layout, parameters and states with those of plain tensors, and their layouts before and after."""
    found, mesh = {}, init_device_mesh("cpu", (2, 2))
    for layout in layouts:
        placements, order = LAYOUTS[layout]
        plain = [numbers(9, 12).requires_grad_(), numbers(9, seed=1).requires_grad_()]
        of_bias = [p if getattr(p, "dim", 0) == 0 else Replicate() for p in placements]
        orders = (order, order if order and 0 in order else None)
        placed = [
            redistribute(place(x.detach(), mesh, p), p, shard_order=o).requires_grad_()
            for x, p, o in zip(plain, (placements, of_bias), orders, strict=True)
        ]
        before = [layout_of(x) for x in placed]
        with CONTEXTS[context]():
            for params in (plain, placed):
                optimizer = OPTIMIZERS[name](params)
                for _ in range(2):
                    loss(params).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            same = [torch.allclose(a.full_tensor(), b, atol=1e-6) for a, b in zip(placed, plain, strict=True)]
            lies = [
                layout_of(s) == own
                for x, own in zip(placed, before, strict=True)
                for s in optimizer.state[x].values() if isinstance(s, DTensor) and s.shape == x.shape
            ]  # fmt: skip
        found[layout] = same, [layout_of(x) for x in placed] == before and all(lies)
    return found


PLACES = {
    "adamw": ("for_dtensor", ["strided", "cut twice", "columns cut twice, the second axis first", "one axis"]),
    "adamw one by one": ("replicate_fallback", ["strided", "columns cut twice, the second axis first", "two dims"]),
    "adamw fused": ("for_dtensor", ["strided, the other dim", "cut twice, the second axis first", "two dims"]),
    "sgd": ("replicate_fallback", ["strided, the other dim", "cut twice, the second axis first"]),
    "means": ("for_dtensor", ["strided", "cut twice, the second axis first", "two dims"]),
}
"""By optimizer, whose operators differ: a context, and layouts that between them are all."""


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_on_plain_tensors(gang, name):
    context, layouts = PLACES[name]
    for found in gang(4).run(trained, name, context, layouts, timeout_s=MANY_S):
        assert found == dict.fromkeys(layouts, ([True, True], True))
