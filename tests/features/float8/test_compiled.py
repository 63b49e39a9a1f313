"""What the compiler makes of float8 layers: only products are outside of its kernels, and these pass over
matrices no more often than those of torchao's layers."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import run_and_get_code

from meshwright.features.float8 import linear as float8_linear
from meshwright.features.float8.linear import AmaxHistory, Float8Linear
from meshwright.features.float8.private import scaled_mm
from meshwright.nn.linear import Linear

PRODUCTS = 3 * 3
"""Of three layers, forward and backward."""
NAMES = ("gate", "up", "down")
MOVED = 0.05
"""Relative difference from eager layers: a kernel doesn't round to bfloat16 what it casts, so an element in 32 moves to
the next number of e5m2, by up to a quarter."""


class Block(nn.Module):
    """A gated network after a norm, whose residual stream and activation casts can be fused with."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.gate, self.up, self.down = Linear(64, 128), Linear(64, 128), Linear(128, 64)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def block(recipe, device="cpu"):
    torch.manual_seed(0)
    made = Block().to(device, torch.bfloat16)
    if recipe == "torchao":
        torchao = pytest.importorskip("torchao.float8")
        return torchao.convert_to_float8_training(made, module_filter_fn=lambda _, name: name in NAMES)
    history = AmaxHistory(len(NAMES), length=4, device=torch.device(device))
    for number, name in enumerate(NAMES):
        layer = Float8Linear.from_linear(getattr(made, name))
        setattr(made, name, layer)
        layer.slots = history.slots(number) if recipe == "delayed" else None
    return made


@pytest.fixture(autouse=True)
def compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def some_input(device="cpu"):
    x = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(1))
    return x.to(device, torch.bfloat16).requires_grad_()


def results(module, forward, x):
    """Output and gradients."""
    y = forward(x)
    y.sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one - other).float().norm() <= MOVED * other.float().norm()


@torch.library.custom_op("meshwright_tests::hidden_mm", mutates_args=())
def hidden_mm(
    a: torch.Tensor, b: torch.Tensor, inverse_a: torch.Tensor, inverse_b: torch.Tensor, dtype: torch.dtype, fast: bool
) -> torch.Tensor:
    """A product that copies its operands where no compiler sees it."""
    return scaled_mm(a, b, inverse_a, inverse_b, dtype, fast=fast)


@hidden_mm.register_fake
def _(a, b, inverse_a, inverse_b, dtype, fast):
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)


def hide():
    return mock.patch.object(float8_linear, "scaled_mm", lambda *args, fast: hidden_mm(*args, fast))


def traced_operators(module):
    """Names of the operators that a compiler gets, of forward and backward, all in one graph each."""
    found = []

    def collect(graph, inputs):
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    torch.compile(module, backend=aot_autograd(fw_compiler=collect), fullgraph=True)(some_input()).sum().backward()
    return found


@pytest.mark.parametrize(
    ("recipe", "hidden"),
    [("delayed", False), ("current", True), pytest.param("current", False, marks=pytest.mark.slow)],
)
def test_the_compiler_sees_all_that_a_layer_computes(recipe, hidden):
    with hide() if hidden else mock.MagicMock():
        operators = traced_operators(block(recipe))
    assert operators.count("aten._scaled_mm.default") == (0 if hidden else PRODUCTS)
    assert operators.count("meshwright_tests.hidden_mm.default") == (PRODUCTS if hidden else 0)


def generated(module):
    """Kernels that pass over matrices, operators outside of kernels, and results."""
    found, codes = run_and_get_code(lambda: results(module, torch.compile(module), some_input()))
    calls = [code[code.index("def call(") :] for code in codes]
    passes = sum(len(re.findall(r"for\s*\(int64_t x0=", code)) for code in codes)
    outside = {name for call in calls for name in re.findall(r"(?:extern_kernels|torch\.ops)\.([\w.]+)\(", call)}
    return passes, outside, found


@pytest.mark.slow
def test_kernels_pass_over_matrices_no_more_often_than_torchao_s():
    theirs, outside, _ = generated(block("torchao"))
    assert theirs > PRODUCTS and outside == {"_scaled_mm"}
    for recipe in ("current", "delayed"):
        passes, outside, found = generated(block(recipe))
        assert PRODUCTS < passes <= theirs and outside == {"_scaled_mm"}
        eager = block(recipe)
        assert_close(found, results(eager, eager, some_input()))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["current", "delayed", "torchao"])
def test_compiled_on_a_gpu_they_compute_what_eager_layers_do(recipe):
    compiled, eager = block(recipe, "cuda"), block(recipe, "cuda")
    found = results(compiled, torch.compile(compiled), some_input("cuda"))
    assert_close(found, results(eager, eager, some_input("cuda")))
