"""Experts on a GPU: grouped_mm against the loop, no host reads, and capture under a capacity."""

from __future__ import annotations

import pytest
import torch

from meshwright.nn.experts.grouped_linear import (
    RowGroups,
    multiply,
    multiply_loop,
    weight_gradient,
    weight_gradient_loop,
)
from meshwright.nn.experts.layer import MixtureOfExperts
from meshwright.nn.experts.router_config import RouterConfig

pytestmark = pytest.mark.gpu
SIZES = [0, 7, 0, 64, 1, 0, 56, 0]


def on_gpu(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def test_grouped_mm_agrees_with_the_loop_and_leaves_no_group_unwritten():
    rows, weights, gradient = on_gpu(sum(SIZES), 64), on_gpu(len(SIZES), 64, 128), on_gpu(sum(SIZES), 128)
    groups = RowGroups(torch.tensor(SIZES, device="cuda"), SIZES)
    for _ in range(3):
        torch.full((1 << 22,), float("nan"), device="cuda")  # freed at once: the next tensors get this memory
        torch.testing.assert_close(
            multiply(rows, weights, groups), multiply_loop(rows, weights, groups), rtol=2e-2, atol=2e-2
        )
        found, expected = (f(gradient, rows, groups) for f in (weight_gradient, weight_gradient_loop))
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def make_layer(**named):
    torch.manual_seed(0)
    layer = MixtureOfExperts(64, RouterConfig(8, 2, balance_loss=0.01, **named), expert_dim=128, shared_dim=128)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return layer.to("cuda", torch.bfloat16)


@pytest.mark.parametrize("factor", [None, 1.25])
def test_a_step_reads_nothing_on_the_host(factor):
    layer, x = make_layer(capacity_factor=factor), on_gpu(2, 32, 64).requires_grad_()
    layer(x).sum().backward()  # kernels are loaded, buffers are made
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(x.grad).all()


@torch.no_grad()
def test_under_a_capacity_a_layer_is_captured():
    layer, static = make_layer(capacity_factor=1.0).eval(), on_gpu(2, 32, 64)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(static)
    for _ in range(3):
        x = on_gpu(2, 32, 64)
        static.copy_(x)
        graph.replay()
        torch.testing.assert_close(out, layer(x), rtol=0, atol=0)
