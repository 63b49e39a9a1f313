"""Captured graphs on a GPU: bitwise what eager layers compute, in every mode, with deferred gradients and dropout."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from meshwright.capture import capture, observe, plan_capture
from meshwright.errors import CaptureError
from meshwright.nn.linear import Linear, compute_deferred, defer_weight_gradients
from meshwright.pipeline import Action, ActionKind, Schedule, generate, lower
from tests.capture.plans import SCALED, plan
from tests.capture.simulated import Bench

K = ActionKind


class Block(nn.Module):
    """A block with a norm, two deferring products and dropout."""

    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(dim), Linear(dim, 4 * dim), Linear(4 * dim, dim)
        self.drop = nn.Dropout(0.1)

    def forward(self, x, scale):
        return x + self.drop(self.down(torch.nn.functional.silu(self.up(self.norm(x))))) * scale


def schedule_of(kind):
    if kind == "split":
        order = ["F0", "F1", "I0", "F2", "W0", "I1", "I2", "W1", "W2"]
        return Schedule("by hand", 3, (0,), (tuple(Action(K(one[0]), 0, int(one[1])) for one in order),))
    return lower(generate("f-then-b", num_stages=1, num_microbatches=3))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["slot", "per_microbatch"])
@pytest.mark.parametrize("kind", ["f-then-b", "split"])
@pytest.mark.parametrize("options", [{}, {"copies_weights": True, "returns_gradients": True}])
def test_replays_are_bitwise_eager_execution(dtype, mode, kind, options):
    torch.manual_seed(0)
    layers = [Block(64).to("cuda", dtype) for _ in range(3)]
    eager = copy.deepcopy(layers)
    schedule, zeros = schedule_of(kind), torch.zeros(2, 16, 64, device="cuda", dtype=dtype, requires_grad=True)
    scale = torch.ones(2, 1, 1, device="cuda", dtype=dtype)
    observed = observe({0: layers}, {0: [(zeros, scale), (None, scale), (None, scale)]})
    signatures = [[one.observed.signature(one.device) for one in observed[0]]]
    made = plan_capture(schedule, layers_per_chunk=3, signatures=signatures, mode=mode)
    store, other = (defer_weight_gradients(nn.ModuleList(side)) for side in (layers, eager))
    runner = capture(observed, made, stores={0: store}, **options)
    for step in range(3):
        for side, run, own in (
            (layers, lambda at, m, *args: runner(at, m, *args), store),
            (eager, lambda at, m, *args: eager[at](*args), other),
        ):
            torch.manual_seed(step)
            _run_step(schedule, side, run, own, step)
        for one, two in zip(layers, eager, strict=True):
            for p, q in zip(one.parameters(), two.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad) and q.grad.isfinite().all() and q.grad.any()
                with torch.no_grad():
                    p.sub_(0.1 * p.grad), q.sub_(0.1 * q.grad)
                p.grad = q.grad = None


def _run_step(schedule, side, run, store, step):
    outputs, deferred = {}, {}
    for _, _, action in schedule.positions():
        m = action.microbatch
        if action.kind is K.FORWARD:
            generator = torch.Generator("cuda").manual_seed(step * 10 + m)
            dtype = side[0].up.weight.dtype
            x = torch.randn(2, 16, 64, device="cuda", generator=generator).to(dtype).requires_grad_()
            h, scale = x, torch.full((2, 1, 1), 1.0 + m, device="cuda", dtype=dtype)
            for at in range(3):
                h = run(at, m, h, scale)
            outputs[m] = h.float().square().mean()
        elif action.kind in (K.BACKWARD, K.BACKWARD_INPUT):
            store.defers = action.kind is K.BACKWARD_INPUT
            outputs[m].backward()
            store.defers = False
            deferred[m] = store.take()
        elif action.kind is K.BACKWARD_WEIGHT:
            compute_deferred(deferred.pop(m))


@pytest.mark.gpu
def test_a_layer_that_reads_on_the_host_is_named():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, device="cuda"))

        def forward(self, x):
            return x * self.weight if x.sum().item() > 1 else x + self.weight

    with pytest.raises(CaptureError, match="reads a tensor on the host"):
        observe({0: [Reads()]}, {0: [(torch.zeros(2, 4, device="cuda", requires_grad=True),)]})


@pytest.mark.parametrize(
    "changes, options",
    [
        ({}, {}),
        ({"signatures": SCALED}, {"copies_weights": True, "returns_gradients": True}),
        ({"kind": "zb-h1", "rank": 1}, {}),
        ({"kind": "dualpipe-v"}, {"returns_gradients": True}),
        ({"mode": "per_microbatch"}, {}),
    ],
)
def test_the_backend_eager_computes_what_eager_layers_do(changes, options):
    """All of the backend cuda but PyTorch's capture and replay, on a CPU."""
    bench = Bench(plan(**{"ranks": 2, "microbatches": 4, **changes}), backend="eager", **options)
    for number in range(2):
        bench.step(number)
        bench.update()
        # A micro-batch has one of the backwards that were captured; what it has saved goes with it.
        assert not any(graphs._roots for graphs in bench.runner._graphs.values())


def test_the_backend_cuda_needs_layers_on_a_device():
    made = plan(ranks=1, microbatches=2)
    bench = Bench(made)
    layers = {0: list(bench.captured.layers[0])}
    x = torch.zeros(2, 8, 4, dtype=torch.bfloat16, requires_grad=True)
    observed = observe(layers, {0: [(x,), (None,)]})
    with pytest.raises(CaptureError, match="the layers are on cpu"):
        capture(observed, made)
