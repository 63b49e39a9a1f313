"""Selective recomputation: bitwise gradients, nothing kept is computed twice; what recomputed forwards recall."""

from __future__ import annotations

import copy
import gc
import importlib
import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.errors import LayoutError
from meshwright.mesh.axes import Axes
from meshwright.mesh.process_groups import build_mesh
from meshwright.models.moe.description import MoeSpec
from meshwright.models.moe.module import MoeBlock
from meshwright.nn.experts.router_config import RouterConfig
from meshwright.nn.kept_results import (
    ATTENTION,
    CHOICES,
    COLLECTIVES,
    MATRIX_PRODUCTS,
    ForwardCache,
    KeepingMode,
    KeptResults,
    is_kept,
)
from meshwright.nn.linear import compute_deferred, defer_weight_gradients
from meshwright.nn.recompute import recompute
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.plan.make_plan import make_plan
from tests.helpers import alternatives, outcome
from tests.nn.test_recompute import D, all_equal, dit, fresh, grads, llama, make, step

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
POLICIES = [RecomputePolicy.SELECTIVE, RecomputePolicy.FULL]


def experts(dtype):
    spec = MoeSpec(1, D, 4, 2, 24, 8, 4, num_experts=4, expert_dim=8, num_shared_experts=1)
    router = RouterConfig(4, 2, balance_loss=0.1, z_loss=0.01)
    _, inputs = llama(dtype)
    return MoeBlock(spec, router, 0).to(dtype), inputs


def filled(kind, dtype=torch.float32):
    """A block and its inputs; experts' matrices are not initialised by their constructor."""
    block, inputs = make(kind, dtype)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    return block, inputs


class Counting(TorchDispatchMode):
    """Calls of operators whose results are kept, and of `tanh`."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if is_kept(func) or "tanh" in func.name():
            self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [llama, experts, dit])
def test_gradients_are_bitwise_those_without_recomputation(kind, dtype, policy):
    block, inputs = filled(kind, dtype)
    other = copy.deepcopy(block)
    recompute(other, policy)
    assert all_equal(step(other, inputs), step(block, inputs))


@pytest.mark.parametrize("kind", [llama, experts, dit])
def test_nothing_kept_is_computed_twice(kind):
    """Counts of the forward and backward: those without recomputation, while full recomputation has more."""
    calls = {}
    for policy in RecomputePolicy:
        block, inputs = filled(kind)
        recompute(block, policy)
        with Counting() as mode:
            step(block, inputs)
        calls[policy] = mode.calls
    assert calls[RecomputePolicy.SELECTIVE] == calls[RecomputePolicy.NONE]
    assert calls[RecomputePolicy.FULL].total() > calls[RecomputePolicy.NONE].total()
    assert calls[RecomputePolicy.NONE]["aten::mm"] + calls[RecomputePolicy.NONE]["aten::addmm"] > 6


class Chooses(nn.Module):
    """Choices and products among work that is done again."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D))

    def forward(self, x):
        y = (x @ self.weight).tanh()
        values, indices = y.topk(2, -1)
        values /= 2 + values.sum(-1, keepdim=True)  # in place, as routers of transformers do
        return (values @ torch.ones(2, D)).tanh() * y.gather(-1, indices).sum(-1, keepdim=True).tanh()


def test_choices_are_kept_and_the_rest_runs_again():
    torch.manual_seed(0)
    module, x = Chooses(), torch.randn(4, D)
    expected = step(module, [x])
    recompute(module, RecomputePolicy.SELECTIVE)
    with Counting() as mode:
        assert all_equal(step(module, [x]), expected)
    assert mode.calls["aten::topk"] == 1 and mode.calls["aten::tanh"] == 6


def test_two_backwards_over_one_graph():
    block, inputs = make(llama)
    expected = step(block, inputs)
    recompute(block, RecomputePolicy.SELECTIVE)
    inputs = fresh(inputs)
    y = block(*inputs).square().sum()
    for _ in range(2):
        block.zero_grad()
        y.backward(retain_graph=True)
        assert all_equal([p.grad for p in block.parameters()], expected[1 + len(grads(inputs)) :])


@pytest.mark.parametrize("outer", POLICIES)
@pytest.mark.parametrize("inner", POLICIES)
def test_within_another_recomputed_module(outer, inner):
    class Stack(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block, self.other = block, copy.deepcopy(block)

        def forward(self, x, *tables):
            return self.other(self.block(x, *tables), *tables)

    block, inputs = filled(experts)
    stack = Stack(block)
    expected = step(copy.deepcopy(stack), inputs)
    recompute(stack.block, inner)
    recompute(stack, outer)
    assert all_equal(step(stack, inputs), expected)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", [llama, experts, dit])
def test_a_split_backward_recomputes_once(kind, policy):
    block, inputs = filled(kind)
    expected = step(copy.deepcopy(block), inputs)
    forwards = []
    next(block.children()).register_forward_hook(lambda *_: forwards.append(1))
    recompute(block, policy)
    store = defer_weight_gradients(block)
    store.defers = True
    inputs = fresh(inputs)
    block(*inputs).square().sum().backward()
    compute_deferred(store.take())
    assert len(forwards) == 2
    gradients = [*grads(inputs), *(p.grad for p in block.parameters())]
    for found, one in zip(gradients, expected[1:], strict=True):
        torch.testing.assert_close(found, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
def test_without_anything_to_train_the_forward_runs_as_it_is(policy, monkeypatch):
    block, inputs = make(llama)
    block.requires_grad_(False)
    recompute(block, policy)
    calls = []
    checkpoint = torch.utils.checkpoint.checkpoint
    monkeypatch.setattr("meshwright.nn.recompute.checkpoint", lambda *a, **k: calls.append(1) or checkpoint(*a, **k))
    assert not block(*inputs).requires_grad and not calls
    x = inputs[0].clone().requires_grad_()
    block(x, *inputs[1:]).sum().backward()  # decided for each forward
    assert x.grad is not None and calls == [1] and all(p.grad is None for p in block.parameters())


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D))

    def forward(self, x):
        product = x @ self.weight
        product.view(-1).add_(1.0)  # by a view, as experts add their biases
        return product.mul_(2.0).tanh() * x @ self.weight


def test_a_result_that_the_block_modifies_in_place_is_kept_as_it_was():
    torch.manual_seed(0)
    module, x = InPlace(), torch.randn(3, D)
    expected = step(module, [x])
    recompute(module, RecomputePolicy.SELECTIVE)
    with Counting() as mode:
        assert all_equal(step(module, [x]), expected)
    assert mode.calls["aten::mm"] == 2 + 4  # of the forward and the backward: none again
    out = module(x).sum()
    first = torch.autograd.grad(out, module.weight, retain_graph=True)
    assert all_equal(first, torch.autograd.grad(out, module.weight))


def test_a_result_modified_outside_the_block_is_an_error():
    class Product(nn.Linear):
        def forward(self, x):
            product = x @ self.weight
            return product, product.tanh()

    module = Product(D, D)
    recompute(module, RecomputePolicy.SELECTIVE)
    product, out = module(torch.randn(3, D))
    with torch.no_grad():
        product.add_(1.0)
    with pytest.raises(LayoutError, match=r"the result of aten::mm in a .* was modified in place") as caught:
        out.sum().backward()
    words = ["recompute.policy=selective", "recompute.blocks=selective:0-1"]
    [fix] = alternatives(caught.value.fix)
    assert {kind.recompute for kind in make_plan(outcome([*words, *fix])).kinds if kind.is_block} == {"full"}


def test_another_forward_is_an_error():
    class Longer(nn.Module):
        num_calls = 0

        def forward(self, x):
            self.num_calls += 1
            for _ in range(self.num_calls):
                x = (x @ x).tanh()
            return x * x.sin()

    module = Longer()
    recompute(module, RecomputePolicy.SELECTIVE)
    with pytest.raises(LayoutError, match=r"calls aten::mm 2 times, but its forward called it 1 times"):
        module(torch.randn(D, D, requires_grad=True)).sum().backward()


def test_paused_results_are_not_kept():
    kept, x = KeptResults(), torch.randn(3, 3)
    with KeepingMode(kept):
        with kept.paused():
            x @ x
        y = x @ x
    assert [one.data_ptr() for one in kept.tensors()] == [y.data_ptr()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [llama, dit])
def test_a_compiled_block_is_one_graph_that_keeps_products(kind):
    block, inputs = make(kind)
    expected = step(block, inputs)
    recompute(block, RecomputePolicy.SELECTIVE)
    torch._dynamo.reset()
    counters.clear()
    block.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(step(block, inputs), expected, rtol=0, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def shard_on_rank(rank, world_size, policy, frozen):
    """Gradients of a recomputed block with frozen parameters under FSDP2, and of the plain one."""
    block, inputs = make(llama)
    for name in frozen:
        block.get_submodule(name).requires_grad_(False)
    plain = copy.deepcopy(block)
    recompute(block, policy)
    fully_shard(block, mesh=build_mesh(Axes(dp_shard=world_size), torch.device("cpu"))["dp_shard"])
    found = []
    for one in (block, plain):
        x = inputs[0].clone().requires_grad_()
        for _ in range(2):  # the second step gathers what the first one freed
            one.zero_grad()
            x.grad = None
            one(x, *inputs[1:]).square().sum().backward()
        grads = [p.grad for p in one.parameters()]
        found.append([x.grad, *(g if g is None or not hasattr(g, "full_tensor") else g.full_tensor() for g in grads)])
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("frozen", [("attention",), ("attention_norm", "attention", "ffn_norm", "ffn")], ids=len)
def test_frozen_parameters_that_fsdp2_frees_are_gathered_again(gang, policy, frozen):
    for found, expected in gang(2).run(shard_on_rank, policy, frozen):
        assert [x is None for x in found] == [x is None for x in expected]
        assert all(a is None or torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_kept_operators_exist():
    """An operator that PyTorch renames would be recomputed from then on, silently."""
    for module in ("comm.alltoallv", "nn.attention.cpu_blocks", "nn.attention.varlen_splash"):
        importlib.import_module(f"meshwright.{module}")  # registers it
    for name in MATRIX_PRODUCTS | ATTENTION | CHOICES | COLLECTIVES:
        namespace, base = name.split("::")
        operator = getattr(getattr(torch.ops, namespace), base)
        assert all(is_kept(getattr(operator, overload)) for overload in operator.overloads() if "out" not in overload)


class CompiledInside(nn.Module):
    """A block with a compiled function, as FlexAttention is one."""

    def __init__(self, compiler):
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.run = torch.compile(lambda x: (x.tanh() @ x.mT).sigmoid() @ x, backend=compiler, fullgraph=True)

    def forward(self, x):
        return self.second(self.run(self.first(x)))


def test_a_compiled_function_in_a_block_stays_compiled():
    graphs = []

    def compiler(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.manual_seed(0)
    plain = CompiledInside(compiler)
    selective = copy.deepcopy(plain)
    recompute(selective, RecomputePolicy.SELECTIVE)
    x = torch.randn(2, 5, D)
    for module in (plain, selective):
        module(x).square().sum().backward()
        assert graphs, "the function ran uncompiled"
        graphs.clear()
        torch.compiler.reset()
    assert all_equal(grads(plain.parameters()), grads(selective.parameters()))


DIM = 4


class Masked(nn.Module):
    """Multiplies by a mask and a factor that would be others if they were computed again."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, dtype=torch.float64))
        self.first, self.second = ForwardCache(), ForwardCache()
        self.num_computed = 0

    def forward(self, x):
        (mask,) = self.first.recall(self.compute)
        (factor,) = self.second.recall(lambda: (2.0 * self.compute()[0] + 1.0,))
        return (x * self.weight * mask).tanh() * factor.exp()

    def compute(self):
        self.num_computed += 1
        return (torch.rand(DIM, dtype=torch.float64),)


class Chain(nn.Module):
    """Several of them: the second's input has to be recomputed by the first."""

    def __init__(self, length=2):
        super().__init__()
        self.parts = nn.ModuleList(Masked() for _ in range(length))

    def forward(self, x):
        for part in self.parts:
            x = part(x) + x
        return x


def make_chain(how):
    torch.manual_seed(0)
    chain = Chain()
    if how in ("parts", "both"):
        for part in chain.parts:
            recompute(part)
    if how in ("whole", "both"):
        recompute(chain)
    return chain


def gradients(chain, order):
    """Gradients of the inputs and parameters after two forwards, and backwards in this order."""
    torch.manual_seed(1)
    inputs = [torch.randn(3, DIM, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    outputs = [chain(x) for x in inputs]
    for n in order:
        outputs[n].square().sum().backward()
    return [*(x.grad for x in inputs), *(p.grad for p in chain.parameters())]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("how", ["parts", "whole", "both"])
def test_two_forwards_before_two_backwards(how, order):
    chain, plain = make_chain(how), make_chain("plain")
    torch.testing.assert_close(gradients(chain, order), gradients(plain, order), rtol=0, atol=0)
    assert [part.num_computed for part in chain.parts] == [part.num_computed for part in plain.parts] == [4, 4]


@pytest.mark.parametrize("how", ["parts", "whole", "both"])
def test_each_of_two_backwards_recalls_them(how):
    chain, x = make_chain(how), torch.randn(3, DIM, dtype=torch.float64, requires_grad=True)
    y = chain(x).square().sum()
    (first,), (second,) = torch.autograd.grad(y, x, retain_graph=True), torch.autograd.grad(y, x)
    assert torch.equal(first, second) and [part.num_computed for part in chain.parts] == [2, 2]


def test_what_a_recomputation_recalls_is_not_kept_for_a_forward_that_is_under_way():
    """The other one of two overlapped tasks may recompute a module within its own forward."""
    chain, plain = make_chain("parts"), make_chain("plain")
    part, compute = chain.parts[0], chain.parts[0].compute
    torch.manual_seed(1)
    x, other = torch.randn(2, 3, DIM, dtype=torch.float64).unbind()
    x, other = x.requires_grad_(), other.requires_grad_()
    earlier = part(other).square().sum()

    def compute_after_a_backward():
        part.compute = compute
        earlier.backward()
        return compute()

    part.compute = compute_after_a_backward
    part(x).square().sum().backward()
    torch.manual_seed(1)
    torch.randn(2, 3, DIM, dtype=torch.float64)
    expected = []
    for one in (other, x):
        again = one.detach().clone().requires_grad_()
        plain.parts[0](again).square().sum().backward()
        expected.append(again.grad)
    torch.testing.assert_close([other.grad, x.grad], expected, rtol=0, atol=0)


class Token:
    """Lives as long as the graph that holds it."""


class Holds(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, token):
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


@pytest.mark.parametrize(
    ("how", "runs_backward"), [("plain", False), ("parts", True), ("whole", False), ("both", True), ("both", False)]
)
def test_a_graph_is_freed_without_the_collector(how, runs_backward):
    chain, x = make_chain(how), torch.randn(3, DIM, dtype=torch.float64, requires_grad=True)
    tokens = [Token(), Token()]
    kept = [weakref.ref(token) for token in tokens]
    factor = torch.rand(DIM, dtype=torch.float64, requires_grad=True)
    for part in chain.parts:
        part.compute = lambda: (Holds.apply(factor, tokens[0]),)
    gc.collect()
    gc.disable()
    try:
        y = Holds.apply(chain(x).sum(), tokens[1])
        tokens[:] = [None, None]
        assert all(reference() is not None for reference in kept[1:])
        if runs_backward:
            y.backward()
        del y
        assert all(reference() is None for reference in kept)
    finally:
        gc.enable()


def test_without_recomputation_nothing_is_kept():
    cache = ForwardCache()
    value = torch.ones(2, requires_grad=True) * 2
    assert cache.recall(lambda: (value, 3)) == (value, 3)
    assert cache.source is None


def test_recalled_tensors_require_gradients_as_before_and_have_no_graph():
    class Recalls(nn.Module):
        def __init__(self):
            super().__init__()
            self.cache, self.seen = ForwardCache(), []

        def forward(self, x):
            y, flag, number = self.cache.recall(lambda: (x * 2, x.detach() > 0, 7))
            self.seen.append((y.requires_grad, y.is_leaf, flag.requires_grad, number))
            return y * y * flag

    module = Recalls()
    recompute(module)
    x = torch.randn(4, requires_grad=True)
    module(x).sum().backward()
    assert module.seen == [(True, False, False, 7), (True, True, False, 7)]
    torch.testing.assert_close(x.grad, 8 * x.detach() * (x.detach() > 0))
