"""Operators on DTensors with a custom shard order: correct within the contexts, lost by DTensor alone."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from meshwright.dtensor_ops.fallback import replicate_fallback
from meshwright.dtensor_ops.operator_context import for_dtensor
from meshwright.reshard.dtensor.placements import layout_of
from meshwright.reshard.dtensor.redistribute import redistribute
from tests.reshard.placing import numbers

MANY_S = 120
"""Timeout for bodies of many operators, which take seconds, and ten times as long on a loaded machine."""

CONTEXTS = {"for_dtensor": for_dtensor, "replicate_fallback": lambda: replicate_fallback(warn=False)}
ORDERS = {
    "both axes cut rows": ((2, 2), [Shard(0), Shard(0)], {0: (1, 0)}),
    "rows by two axes of three": ((2, 1, 2), [Shard(0), Replicate(), Shard(0)], {0: (2, 0)}),
}


def ordered(x, mesh, placements, order):
    """Distribute `x`, a plain tensor that all ranks hold, with a shard order."""
    copies = distribute_tensor(x.clone(), mesh, [Replicate()] * mesh.ndim)
    return redistribute(copies, placements, shard_order=order)


def in_order(x, like):
    """Distribute `x` as `like`, in the default shard order."""
    return distribute_tensor(x, like.device_mesh, like.placements) if isinstance(like, DTensor) else x


def written(write):
    def call(x):
        y = x.clone()
        write(y)
        return y

    return call


# From x [7, 5] or a plain tensor of it: what an operator returns, or leaves in a copy of x.
BY_ELEMENT = {
    "detach": lambda x: x.detach(),
    "add": lambda x: x + 1,
    "product with one in order": lambda x: x * in_order(numbers(7, 5, seed=3), x),
    "product of one in order": lambda x: in_order(numbers(7, 5, seed=3), x) * x,
    "where": lambda x: torch.where(x > 0, x, 0.5),
    "zeros_like": torch.zeros_like,
    "to": lambda x: x.to(torch.float64),
    "add_": written(lambda x: x.add_(1)),
    "copy_": written(lambda x: x.copy_(in_order(numbers(7, 5, seed=3), x))),
    "lists": lambda x: torch._foreach_add([x, x], [x, in_order(numbers(7, 5, seed=3), x)])[1],
    "lists in place": written(lambda x: torch._foreach_mul_([x], [in_order(numbers(7, 5, seed=3), x)])),
    "out": written(lambda x: torch.mul(x, in_order(numbers(7, 5, seed=3), x), out=x)),
}
OTHERS = {
    "t": lambda x: x.t() + 0,
    "sum": lambda x: x.sum(0),
    "a row is added": lambda x: x + (in_order(numbers(5), x) if not isinstance(x, DTensor) else
                                     distribute_tensor(numbers(5), x.device_mesh, [Replicate()] * x.device_mesh.ndim)),
    "select": lambda x: x[3] + 0,
    "softmax": lambda x: x.softmax(0),
    "cat": lambda x: torch.cat([x, x]),
    "sort": lambda x: x.sort(0).values,
    "scatter_": written(lambda x: x.scatter_(1, in_order(torch.arange(7).view(7, 1) % 5, x), 9.0)),
    "norms": lambda x: torch._foreach_norm([x])[0],
}  # fmt: skip


def found_by(context, mesh, placements, order):
    """Check, by operator, the values and, for elementwise ones, that the order is preserved."""
    whole, found = numbers(7, 5), {}
    with context():
        x = ordered(whole, mesh, placements, order)
        for name, call in (BY_ELEMENT | OTHERS).items():
            y, wanted = call(x), call(whole)
            stayed = name in OTHERS or layout_of(y) == layout_of(x)
            found[name] = torch.allclose(y.full_tensor(), wanted.to(y.dtype), atol=1e-6), stayed
        found["x is as it was"] = torch.equal(x.full_tensor(), whole), True
    return found


def all_found(rank, world_size, name, where):
    mesh_shape, placements, order = ORDERS[where]
    return found_by(CONTEXTS[name], init_device_mesh("cpu", mesh_shape), placements, order)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "where"), list(product(CONTEXTS, ORDERS)))
def test_operators_keep_to_the_order(gang, name, where):
    for found in gang(4).run(all_found, name, where, timeout_s=MANY_S):
        assert found == dict.fromkeys(found, (True, True))


def bare(rank, world_size):
    """Check which operators are correct by DTensor alone."""
    whole = numbers(8, 4)
    x = ordered(whole, init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(0)], {0: (1, 0)})
    return [torch.equal(call(x).full_tensor(), call(whole)) for call in
            (lambda x: x, lambda x: x.detach(), lambda x: x.t(), lambda x: x.view(4, 8))]  # fmt: skip


def test_dtensor_alone_loses_it(gang):
    """Justify the layer: if this fails, PyTorch preserves shard orders."""
    for found in gang(4).run(bare):
        assert found == [True, False, False, False]


def gradient(rank, world_size, name):
    mesh = init_device_mesh("cpu", (2, 2))
    plain = numbers(7, 5).requires_grad_()
    with CONTEXTS[name]():
        x = ordered(plain.detach(), mesh, [Shard(0), Shard(0)], {0: (1, 0)}).requires_grad_()
        for one in (plain, x):
            ((one * one).sum() + (one.t() @ one.detach()).tanh().sum()).backward()
        return torch.allclose(x.grad.full_tensor(), plain.grad, atol=1e-5)


@pytest.mark.parametrize("name", CONTEXTS)
def test_gradients_are_those_of_plain_tensors(gang, name):
    assert all(gang(4).run(gradient, name, timeout_s=MANY_S))


def memory(rank, world_size):
    """Check writes through a detached tensor and a view, in-place transposition, and partial values."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = numbers(7, 5)
    x = ordered(whole, mesh, [Shard(0), Shard(0)], {0: (1, 0)})
    with for_dtensor():
        x.detach().mul_(2)
        x.t().add_(1)
        turned = x.t_()
        turned.add_(1)
    cube = init_device_mesh("cpu", (2, 1, 2))
    with for_dtensor():
        part = ordered(whole, cube, [Shard(0), Replicate(), Shard(0)], {0: (2, 0)})
        part = redistribute(part, [Shard(0), Partial(), Shard(0)], shard_order={0: (2, 0)})
        total = (part * 2).full_tensor()
    return turned is x and torch.equal(x.full_tensor(), (2 * whole + 1 + 1).t()), torch.equal(total, 2 * whole)


def test_memory_is_shared_where_pytorch_shares_it(gang):
    assert gang(4).run(memory, timeout_s=MANY_S) == [(True, True)] * 4


def test_functions_are_compiled_within_the_context():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with for_dtensor():
        found = torch.compile(lambda x: x.sin() + 1, backend=backend)(numbers(3))
    assert torch.equal(found, numbers(3).sin() + 1) and len(graphs) == 1
