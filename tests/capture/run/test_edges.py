"""Layers that are used in unusual ways: every one computes what it computes eagerly, or is refused with the reason."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

from meshwright.capture import capture, observe, plan_capture
from meshwright.capture.lifetimes import GRADIENTS, Content, Role
from meshwright.capture.run.observe import Observer
from meshwright.errors import CaptureError
from meshwright.nn.linear import Linear, compute_deferred, defer_weight_gradients
from meshwright.pipeline import generate, lower

M = 3


def schedule(kind="1f1b", num_microbatches=M):
    return lower(generate(kind, num_stages=1, num_microbatches=num_microbatches))


def runner_of(layers, samples, kind="1f1b", backend="simulate", **options):
    observed = observe({0: layers}, {0: samples})
    signatures = [[one.observed.signature("cpu") for one in observed[0]]]
    plan = plan_capture(schedule(kind), layers_per_chunk=len(layers), signatures=signatures)
    return capture(observed, plan, backend=backend, **options)


def reasons(module, *args):
    observer = Observer()
    observer.run(module, module.forward, args, {})
    return observer.found[0].reasons


def zeros(*shape):
    return torch.zeros(*shape, requires_grad=True)


class Added(nn.Module):
    """A layer with an argument, a constant and a product."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))

    def forward(self, x, position, *, scale=1.0):
        return ((x + position) @ self.weight).tanh() * scale


@pytest.mark.parametrize("reach", ["argument", "input"])
def test_gradients_of_parameters_that_reach_a_layer_directly_are_added_up(reach):
    """Autograd takes the first gradient of a leaf as its `.grad`: it must not be static memory."""
    layer, position = Added(), nn.Parameter(torch.ones(2, 4))
    eager, other = copy.deepcopy(layer), nn.Parameter(torch.ones(2, 4))
    run = runner_of([layer], [(zeros(2, 4), zeros(2, 4))])
    for m in range(M):
        x = torch.full((2, 4), float(m), requires_grad=True)
        swap = reach == "input"
        run(0, m, *((position, x) if swap else (x, position))).sum().backward()
        x = torch.full((2, 4), float(m), requires_grad=True)
        eager(*((other, x) if swap else (x, other))).sum().backward()
    assert torch.equal(position.grad, other.grad) and torch.equal(layer.weight.grad, eager.weight.grad)


def test_other_constants_run_eagerly_named_or_not():
    layer = Added()
    eager = copy.deepcopy(layer)
    run = runner_of([layer], [(zeros(2, 4), zeros(2, 4))])
    for m, named in enumerate(({}, {"scale": 3.0}, {"scale": 4.0})):
        x, position = torch.randn(2, 4, requires_grad=True), torch.ones(2, 4, requires_grad=True)
        y = run(0, m, x, position, **named)
        assert torch.equal(y, eager(x, position, **named))
        y.sum().backward()
    assert sum(run.stats().eager.values()) == 2


def test_a_transposed_output_is_not_what_follows():
    one, two = Linear(4, 4), Linear(4, 4)
    x = zeros(4, 4)
    observer = Observer()
    y = observer.run(one, one.forward, (x,), {})
    observer.run(two, two.forward, (y.T,), {})
    observer.run(two, two.forward, (y.view(4, 4),), {})
    assert [found.follows for found in observer.found] == [False, False, False]
    observer.run(two, two.forward, (observer._last.view(4, 4),), {})
    assert observer.found[-1].follows


class Tied(nn.Module):
    """A layer that uses one matrix twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Linear(4, 4), Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).tanh())


@pytest.mark.parametrize("returns", [False, True])
def test_a_tied_weight_has_the_sum_of_its_deferred_gradients(returns):
    layer = Tied()
    eager = copy.deepcopy(layer)
    stores = [defer_weight_gradients(one) for one in (layer, eager)]
    run = runner_of([layer], [(zeros(3, 4),)], "zb-h1", stores={0: stores[0]}, returns_gradients=returns)
    for m in range(M):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(m))
        for store, call in zip(stores, (lambda x, m=m: run(0, m, x), eager), strict=True):
            store.defers = True
            call(x.clone().requires_grad_()).square().sum().backward()
            store.defers = False
            compute_deferred(store.take())
    torch.testing.assert_close(layer.first.weight.grad, eager.first.weight.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("returns", [False, True])
def test_a_weight_that_two_layers_share_has_the_sum_of_its_deferred_gradients(returns):
    """The gradient that one layer's graphs add to is not where the other's add, when their turn comes."""
    layers = [Linear(4, 4), Linear(4, 4)]
    layers[1].weight = layers[0].weight
    eager = copy.deepcopy(nn.ModuleList(layers))
    stores = [defer_weight_gradients(one) for one in (nn.ModuleList(layers), eager)]
    options = {"stores": {0: stores[0]}, "returns_gradients": returns}
    run = runner_of(layers, [(zeros(3, 4),), (None,)], "zb-h1", **options)
    compute = (run.backward_dw, lambda: compute_deferred(stores[1].take()))
    for m in range(M):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(m))
        calls = (lambda x, m=m: run(1, m, run(0, m, x)), lambda x: eager[1](eager[0](x)))
        for store, call, weights in zip(stores, calls, compute, strict=True):
            store.defers = True
            call(x.clone().requires_grad_()).square().sum().backward()
            store.defers = False
            weights()
    torch.testing.assert_close(layers[0].weight.grad, eager[0].weight.grad, rtol=1e-6, atol=1e-6)


def test_copies_of_weights_are_refreshed_though_a_step_begins_eagerly():
    layer = Added()
    eager = copy.deepcopy(layer)
    run = runner_of([layer], [(zeros(2, 4), zeros(2, 4))], copies_weights=True, returns_gradients=True)
    for step in range(2):
        for m in range(M):
            x, position = torch.ones(2, 4, requires_grad=True), torch.ones(2, 4, requires_grad=True)
            named = {"scale": 2.0} if m == 0 else {}
            y = run(0, m, x, position, **named)
            assert torch.equal(y, eager(x, position, **named)), step
            y.sum().backward()
        with torch.no_grad():
            layer.weight.add_(1), eager.weight.add_(1)


def test_a_gradient_of_ones_own_is_added_to():
    layer = Added()
    run = runner_of([layer], [(zeros(2, 4), zeros(2, 4))])
    layer.weight.grad = own = torch.ones(4, 4)
    for m in range(M):
        run(0, m, torch.ones(2, 4, requires_grad=True), torch.ones(2, 4, requires_grad=True)).sum().backward()
    eager = copy.deepcopy(layer)
    eager.weight.grad = None
    eager(torch.ones(2, 4), torch.ones(2, 4)).sum().backward()
    torch.testing.assert_close(layer.weight.grad, 1 + 3 * eager.weight.grad)
    assert torch.equal(own, torch.ones(4, 4))


class Partly(nn.Module):
    """A layer of which the loss may use one result, with parameters and arguments behind neither or one of them."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name in ("first", "second", "both", "unused", "frozen"):
            linear = Linear(4, 4)
            linear.weight = nn.Parameter(torch.randn(4, 4, generator=generator), requires_grad=name != "frozen")
            setattr(self, name, linear)

    def forward(self, x, one, other, unused):
        h = self.both(x) + self.frozen(x)
        return self.first(h * one), self.second(h + other).tanh()


@pytest.mark.parametrize("backend", ["simulate", "eager"])
@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("kind", ["1f1b", "zb-h1"])
def test_what_the_loss_does_not_reach_has_no_gradient(kind, returns, backend):
    """As in eager execution: AdamW moves a parameter whose gradient is zero, and not one whose gradient is None."""
    layer = Partly()
    eager, inputs = copy.deepcopy(layer), nn.ParameterList([torch.ones(2, 4) for _ in range(4)])
    others = copy.deepcopy(inputs)
    sides = ((layer, inputs), (eager, others))
    stores = [defer_weight_gradients(one) for one, _ in sides]
    options = {"stores": {0: stores[0]}} if kind == "zb-h1" else {}
    samples = [tuple(zeros(2, 4) for _ in range(4))]
    run = runner_of([layer], samples, kind, backend, returns_gradients=returns, **options)
    optimizers = [torch.optim.AdamW([*m.parameters(), *i], lr=0.1, weight_decay=1.0) for m, i in sides]
    for step, uses in enumerate([((0,), (0,), (0,)), ((1,), (1,), (1,)), ((0, 1), (1,), (0,)), ((0,), (0, 1), (1,))]):
        for m, used in enumerate(uses):
            calls = (lambda *x, m=m: run(0, m, *x), eager)
            for store, values, call in zip(stores, (inputs, others), calls, strict=True):
                store.defers = kind == "zb-h1"
                results = call(*(value * (m + step) for value in values))
                sum(results[at].square().sum() for at in used).backward()
                store.defers = False
                compute_deferred(store.take())
        for (name, one), (_, other) in zip(*(nn.ModuleList(side).named_parameters() for side in sides), strict=True):
            assert (one.grad is None) == (other.grad is None), (step, name)
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 1)
    torch.testing.assert_close(dict(layer.named_parameters()), dict(eager.named_parameters()), rtol=1e-5, atol=1e-5)


def test_a_tensor_given_twice_is_two_arguments():
    class Twice(Added):
        def forward(self, x, one, other):
            return super().forward(x, one * other)

    layer, same = Twice(), torch.full((2, 4), 2.0)
    run = runner_of([layer], [(zeros(2, 4), same, same)])
    x = torch.ones(2, 4, requires_grad=True)
    assert torch.equal(run(0, 0, x, same, same + 1), layer(x, same, same + 1))


def test_layers_that_shared_an_argument_share_it_always():
    """The second layer's graph reads the argument where the first one's forward has put it."""
    position = zeros(2, 4)
    run = runner_of([Added(), Added()], [(zeros(2, 4), position), (None, position)])
    given = torch.ones(2, 4, requires_grad=True)
    y = run(0, 0, zeros(2, 4), given)
    with pytest.raises(CaptureError, match="gets another tensor as the input .number 1.* than layer 0"):
        run(1, 0, y, zeros(2, 4))


def test_gradients_are_released_with_their_micro_batch():
    run = runner_of([Added(), Added()], [(zeros(2, 4), position := zeros(2, 4)), (None, position)])
    x = torch.ones(2, 4, requires_grad=True)
    y = run(1, 0, run(0, 0, x, position), position)
    y.sum().backward()
    held = run._statics._held
    assert Content(Role.INPUT_GRADIENT, 0, 1, 0) in held
    run(0, 1, x, position)
    # The gradient of the chunk's input may be read until the micro-batch's memory is used again.
    assert not [one for one in held if one and one.microbatch == 0 and one.role in GRADIENTS and one.layer]


def test_capturing_leaves_deferred_gradients_of_before():
    layer = Linear(4, 4)
    store = defer_weight_gradients(nn.ModuleList([layer]))
    store.defers = True
    layer(zeros(2, 4)).sum().backward()
    store.defers = False
    runner_of([layer], [(zeros(2, 4),)], "zb-h1", stores={0: store})
    (entry,) = store.take()
    assert entry.parameter is layer.weight and torch.equal(entry.compute(*entry.tensors), torch.zeros(4, 4))


class Replacing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = self.mean + x.detach().mean(0)
        return x * self.weight


class Returning(Replacing):
    def forward(self, x):
        return x * self.weight, x


class Reading(Replacing):
    def forward(self, x):
        return x * self.weight if self.mean.sum() > 0 else x + self.weight


class Masking(Replacing):
    def forward(self, x):
        return (x * self.weight)[x > -1]


@pytest.mark.parametrize(
    "module, reason",
    [
        (Replacing(), "it replaces its buffer mean"),
        (Returning(), "it returns one of its arguments"),
        (Reading(), r"it reads a tensor on the host (__bool__, test_edges.py"),
        (Masking(), "it waits for the device (aten::"),
    ],
)
def test_what_a_graph_cannot_do_is_a_reason(module, reason):
    assert reasons(module, zeros(3, 4))[0].startswith(reason)
    with pytest.raises(CaptureError, match="layer 0 of stage 0 can't be captured: it"):
        observe({0: [module]}, {0: [(zeros(3, 4),)]})


def communication_and_units(rank, world_size):
    class Sending(Replacing):
        def forward(self, x):
            torch.distributed.all_reduce(y := (x * self.weight).detach())
            return x * self.weight + y

    class Unit(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
            fully_shard(self.inner)

        def forward(self, x):
            return self.inner(x)

    sharded = Added()
    sharded.weight = nn.Parameter(distribute_tensor(sharded.weight, mesh := init_device_mesh("cpu", (world_size,))))
    found = [reasons(module, zeros(3, 4))[0] for module in (Sending(), Unit())]
    replicated = [distribute_tensor(zeros(3, 4), mesh, [Replicate()]) for _ in range(2)]
    return [*found, reasons(sharded, *replicated)]


def test_communication_and_units_within_are_reasons(gang):
    for sending, unit, sharded in gang(2).run(communication_and_units):
        assert "it is tensor-parallel" in sharded
        assert sending == "it communicates (c10d::allreduce_)"
        assert unit == "inner is an FSDP unit of its own, gathered while it runs"
