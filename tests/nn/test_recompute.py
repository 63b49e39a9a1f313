"""Recomputed modules: bitwise equal, with unchanged names, hooks, compilation and FSDP2."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard

from meshwright.mesh.axes import Axes
from meshwright.mesh.process_groups import build_mesh
from meshwright.models.dit.module import DiTBlock
from meshwright.nn.recompute import recompute
from tests.nn.blocks import context, make_block

B, T, D = 2, 6, 16


def llama(dtype):
    block = make_block(D).to(dtype)
    return block, (torch.randn(B, T, D, dtype=dtype), context(block.attention, T, dtype))


def dit(dtype):
    block = DiTBlock(D, num_heads=4, head_dim=4, ffn_dim=24).to(dtype)
    tokens = context(block.attention, T, dtype, rotary=False)
    return block, (torch.randn(B, T, D, dtype=dtype), torch.randn(B, D, dtype=dtype), tokens)


def make(kind, dtype=torch.float32):
    torch.manual_seed(0)
    return kind(dtype)


def fresh(inputs):
    """Copies that require gradients, of the inputs that are tensors."""
    return [x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x for x in inputs]


def grads(inputs):
    """The gradients of the inputs that are tensors."""
    return [x.grad for x in inputs if isinstance(x, torch.Tensor)]


def step(module, inputs, **named):
    """The output, and the gradients of inputs and parameters."""
    inputs = fresh(inputs)
    module.zero_grad()
    y = module(*inputs, **named)
    y.square().sum().backward()
    return [y.detach(), *grads(inputs), *(p.grad.clone() for p in module.parameters())]


def all_equal(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", [llama, dit])
def test_only_the_inputs_stay_and_the_forward_runs_again(kind):
    block, inputs = make(kind)
    names, outer, inner, saved = list(block.state_dict()), [], [], []
    block.register_forward_hook(lambda *_: outer.append(1))
    next(block.children()).register_forward_hook(lambda *_: inner.append(1))
    recompute(block)
    assert list(block.state_dict()) == names and list(dict(block.named_parameters())) == names
    inputs[0].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        y = block(*inputs)
    assert len(outer) == len(inner) == 1
    assert {x.data_ptr() for x in saved} <= {x.data_ptr() for x in inputs if isinstance(x, torch.Tensor)}, (
        "nothing but inputs is kept"
    )
    y.sum().backward()
    assert (len(outer), len(inner)) == (1, 2), "hooks are around what is recomputed"


class Named(nn.Module):
    """Inputs by position and by name; names that checkpoint has too, a default, and something that is no tensor."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D))

    def forward(self, x, y=None, *, debug, context_fn=1.0, flip=False):
        out = (x * self.weight).tanh() * debug.exp() * context_fn
        return (out if y is None else out * y.sin()).flip(0) if flip else out


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_inputs_go_through_by_position_and_by_name(backend):
    torch.manual_seed(0)
    module, x, y, z = Named(), *torch.randn(3, 4, D)
    plain = copy.deepcopy(module)
    recompute(module)
    if backend:
        module.compile(backend=backend, fullgraph=True)
    for inputs, named in (((x,), {}), ((x, y), {"flip": True}), ((x, y), {"flip": True, "context_fn": 2.5})):
        debug, again = (z.clone().requires_grad_() for _ in range(2))
        expected, found = step(plain, inputs, debug=debug, **named), step(module, inputs, debug=again, **named)
        torch.testing.assert_close(found, expected, rtol=0, atol=0 if backend is None else 1e-6)
        torch.testing.assert_close(again.grad, debug.grad, rtol=0, atol=0 if backend is None else 1e-6)


def test_a_deep_copy_recomputes_itself():
    block, inputs = make(llama)
    recompute(block)
    other = copy.deepcopy(block)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    step(block, inputs)
    expected = [p.grad.clone() for p in block.parameters()]
    found = step(other, inputs)
    assert all(torch.equal(p.grad, g) for p, g in zip(block.parameters(), expected, strict=True))
    assert not torch.equal(found[0], block(*inputs))


def test_a_forward_that_somebody_replaced_is_what_is_recomputed():
    module = nn.Linear(3, 3)
    module.forward = lambda x: x * 3
    recompute(module)
    assert torch.equal(module(torch.ones(3)), torch.full((3,), 3.0))


def test_random_numbers_come_again_only_where_asked_for():
    def drop(recomputes=True, **options):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Tanh())
        if recomputes:
            recompute(module, **options)
        return step(module, [torch.randn(8, 64)])

    expected = drop(recomputes=False)
    assert all_equal(drop(preserve_rng_state=True), expected)
    assert not all_equal(drop(), expected), "this is what the docstring warns of"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [llama, dit])
def test_a_compiled_block_is_one_graph(kind):
    block, inputs = make(kind)
    expected = step(block, inputs)
    graphs = []

    def backend(graph, examples):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, examples)

    recompute(block)
    torch._dynamo.reset()
    counters.clear()
    block.compile(backend=backend)
    for _ in range(2):
        torch.testing.assert_close(step(block, inputs), expected, rtol=0, atol=1e-4)
    assert len(graphs) == 1 and not counters["graph_break"], dict(counters)
    operators = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert any("tag_activation_checkpoint" in name for name in operators), "the graph is recomputed"


def shard_on_rank(rank, world_size, compiles):
    """Gradients of a recomputed block under FSDP2, gathered, and those of the plain one."""
    block, inputs = make(llama)
    plain = copy.deepcopy(block)
    recompute(block)
    if compiles:
        block.compile(backend="aot_eager")
    fully_shard(block, mesh=build_mesh(Axes(dp_shard=world_size), torch.device("cpu"))["dp_shard"])
    names = [name for name, _ in block.named_parameters()]
    step_sharded = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in step(block, inputs)]
    return names, step_sharded, step(plain, inputs)


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_sharded_block(gang, compiles):
    for names, found, expected in gang(2).run(shard_on_rank, compiles):
        assert names == [name for name, _ in make(llama)[0].named_parameters()]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 if compiles else 0)
