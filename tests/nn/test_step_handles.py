"""Step handles in a model: each sample counts once, with recomputation, deferral and compilation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from meshwright.errors import LayoutError
from meshwright.nn.linear import Linear, compute_deferred, defer_weight_gradients
from meshwright.nn.recompute import recompute
from meshwright.nn.step_handles import (
    AuxiliaryLoss,
    LoadCounter,
    StepBuffer,
    auxiliary_losses,
    handles,
    load_counters,
    step_buffers,
)

D, E = 6, 4
WEIGHT, SCALE = 0.3, 0.125


class Router(nn.Module):
    """Scales the stream by a gate, balances the gates, and counts which one is the largest."""

    def __init__(self):
        super().__init__()
        self.gates, self.out = Linear(D, E), Linear(D, D)
        self.balance = AuxiliaryLoss("balance", WEIGHT)
        self.seen = StepBuffer((E,), torch.int64)

    def forward(self, x_btd):
        x_btd, loss_sum = self.compute(x_btd)
        return self.out(self.balance(x_btd, loss_sum)).tanh()

    def compute(self, x_btd):
        gates_bte = self.gates(x_btd).softmax(-1)
        self.seen.add(gates_bte.argmax(-1).flatten().bincount(minlength=E))
        return x_btd * gates_bte.amax(-1, keepdim=True), gates_bte.mean(1).square().sum()

    def plain(self, x_btd):
        """The output and the loss, without handles."""
        gates_bte = x_btd @ self.gates.weight.T
        gates_bte = gates_bte.softmax(-1)
        y_btd = x_btd * gates_bte.amax(-1, keepdim=True) @ self.out.weight.T
        return y_btd.tanh(), gates_bte.mean(1).square().sum(), gates_bte.argmax(-1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Router(), Router()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def make(how="plain", dtype=torch.float64):
    torch.manual_seed(0)
    model = Model().to(dtype)
    batches = [torch.randn(3, 5, D, dtype=dtype, requires_grad=True) for _ in range(2)]
    for _, loss in auxiliary_losses(model):
        loss.scale = SCALE
    if how in ("blocks", "both"):
        for block in model.blocks:
            recompute(block)
    if how in ("whole", "both"):
        recompute(model)
    return model, batches


def reference(model, batches):
    """Gradients of main + weight × scale × auxiliary, that sum by block, and counts by block."""
    total, aux, counts = 0, [0, 0], [torch.zeros(E, dtype=torch.int64) for _ in range(2)]
    for x in batches:
        for n, block in enumerate(model.blocks):
            x, loss_sum, largest = block.plain(x)
            aux[n] = aux[n] + WEIGHT * SCALE * loss_sum
            for e in range(E):
                counts[n][e] += (largest == e).sum()
        total = total + x.square().sum()
    inputs = [*batches, *model.parameters()]
    return torch.autograd.grad(total + sum(aux), inputs), [value.detach() for value in aux], counts


WAYS = ["plain", "blocks", "whole", "both"]
"""What is recomputed."""


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("how", WAYS)
def test_gradients_are_those_of_the_total_and_values_count_once(how, splits):
    model, batches = make(how)
    expected, values, counts = reference(model, batches)
    store = defer_weight_gradients(model)
    store.defers = splits
    edges = [model(x).square().sum() for x in batches]
    pending = [buffer.pending().tolist() for _, buffer in step_buffers(model)]
    assert pending == [wanted.tolist() for wanted in counts], "it is the first forward that counts"
    for edge in reversed(edges):
        edge.backward()
    deferred = store.take()
    assert len(deferred) == (8 if splits else 0)
    compute_deferred(deferred)
    check(model, batches, (expected, values, counts), 1e-15)


def check(model, batches, reference, tolerance):
    expected, values, counts = reference
    for leaf, wanted in zip([*batches, *model.parameters()], expected, strict=True):
        torch.testing.assert_close(leaf.grad, wanted, rtol=0, atol=tolerance)
    for (_, loss), value in zip(auxiliary_losses(model), values, strict=True):
        torch.testing.assert_close(loss.take(), value, rtol=0, atol=tolerance)
        assert loss.take() is None and not loss.recomputing
    for (_, buffer), wanted in zip(step_buffers(model), counts, strict=True):
        assert buffer.pending().tolist() == wanted.tolist() and wanted.sum() == 2 * 3 * 5


def test_without_the_handle_s_gradient_the_reference_would_differ():
    """The tolerance of the test before is far below what it is about."""
    model, batches = make()
    expected, *_ = reference(model, batches)
    for _, loss in auxiliary_losses(model):
        loss.scale = 0.0
    sum(model(x).square().sum() for x in batches).backward()
    gates = model.blocks[0].gates.weight
    wanted = expected[len(batches)]
    assert (gates.grad - wanted).abs().max() > 1e-4


@pytest.mark.parametrize("given", [torch.zeros, torch.ones, torch.randn], ids=["zeros", "ones", "random"])
def test_the_loss_s_gradient_does_not_depend_on_the_stream_s(given):
    loss, x = AuxiliaryLoss("one", WEIGHT), torch.randn(3, 2, requires_grad=True)
    parameter = torch.tensor(2.0, requires_grad=True)
    loss.scale = SCALE
    y, gradient = loss(x, parameter**2), given(3, 2)
    assert torch.equal(y, x) and y.data_ptr() == x.data_ptr()
    y.backward(gradient)
    assert torch.equal(x.grad, gradient)
    torch.testing.assert_close(parameter.grad, torch.tensor(4 * WEIGHT * SCALE))


@pytest.mark.parametrize(("x_trains", "loss_trains"), [(True, False), (False, True), (False, False)])
def test_what_needs_no_gradient_gets_none(x_trains, loss_trains):
    loss, x = AuxiliaryLoss("one", WEIGHT), torch.randn(3, requires_grad=x_trains)
    parameter = torch.tensor(2.0, requires_grad=loss_trains)
    y = loss(x, parameter * 1)
    assert y.requires_grad == (x_trains or loss_trains)
    if y.requires_grad:
        y.sum().backward()
    assert (x.grad is not None) == x_trains and (parameter.grad is not None) == loss_trains
    torch.testing.assert_close(loss.take(), torch.tensor(2 * WEIGHT))


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("eval_mode", [False, True])
def test_an_evaluation_leaves_nothing(how, eval_mode):
    model, batches = make(how)
    model.train(not eval_mode)
    with torch.set_grad_enabled(eval_mode):
        y = model(batches[0])
    assert torch.equal(y, make()[0].eval()(batches[0])) and y.requires_grad == eval_mode
    assert all(loss.take() is None for _, loss in auxiliary_losses(model))
    assert all(buffer._contribution is None and not buffer.pending().any() for _, buffer in step_buffers(model))
    if eval_mode:
        y.square().sum().backward()
        total = batches[0]
        for block in model.blocks:
            total, *_ = block.plain(total)
        expected = torch.autograd.grad(total.square().sum(), list(model.parameters()))
        for parameter, wanted in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, wanted, rtol=0, atol=1e-15)


def test_bfloat16_values_are_summed_in_float32():
    loss, x = AuxiliaryLoss("one", 1.0), torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(300):
        loss(x, x.float().exp().sum().bfloat16())
    value = loss.take()
    assert value.dtype is torch.float32 and value == 600 and not value.requires_grad
    loss.scale = 0.5
    loss(x, x.exp().sum()).float().sum().backward()
    assert x.grad.tolist() == [1.5, 1.5] and x.grad.dtype is torch.bfloat16


def test_an_auxiliary_loss_is_a_scalar():
    with pytest.raises(LayoutError, match=r"'balance' got a tensor of shape \[3\]"):
        AuxiliaryLoss("balance", 1.0)(torch.zeros(2, requires_grad=True), torch.zeros(3))


def test_two_backwards_over_one_graph_recompute_twice_and_count_once():
    module, x = Router(), torch.randn(2, 3, D, requires_grad=True)
    recompute(module)
    y = module(x).sum()
    first, second = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second) and module.seen.pending().sum() == 2 * 3


def test_a_backward_within_a_recomputed_forward():
    """The inner module's recomputation ends within the outer one's, which goes on."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Router()

        def forward(self, x):
            (gradient,) = torch.autograd.grad(self.inner(x).sum(), x)
            return self.inner(x + gradient).exp()  # needs the second call's output again

    outer, x = Outer(), torch.randn(2, 3, D, requires_grad=True)
    recompute(outer.inner)
    recompute(outer)
    outer(x).sum().backward()
    assert outer.inner.seen.pending().sum() == 2 * 2 * 3


def test_a_recomputing_forward_that_fails_leaves_the_handles_as_they_were():
    module, x = Router(), torch.randn(2, 3, D, requires_grad=True)
    module.gates.register_forward_hook(lambda *_: 1 / 0 if module.balance.recomputing else None)
    recompute(module)
    with pytest.raises(ZeroDivisionError):
        module(x).sum().backward()
    assert not module.balance.recomputing and not module.seen.recomputing


@pytest.mark.parametrize("how", [pytest.param("plain", marks=pytest.mark.slow), "blocks"])
def test_a_compiled_model_counts_the_same(how):
    model, batches = make(how)
    expected = reference(model, batches)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    for x in batches:
        model(x).square().sum().backward()
    check(model, batches, expected, 1e-14)


def test_handles_are_found_by_name():
    model, _ = make()
    names = ["blocks.0.balance", "blocks.0.seen", "blocks.1.balance", "blocks.1.seen"]
    assert [name for name, _ in handles(model)] == names
    assert [name for name, _ in auxiliary_losses(model)] == names[::2]
    assert [name for name, _ in step_buffers(model)] == names[1::2]
    assert all(model.get_submodule(name) is handle for name, handle in handles(model))
    module = nn.ModuleDict({"b": LoadCounter(2), "a": LoadCounter(3), "c": StepBuffer((2,), torch.int64)})
    assert load_counters(module) == [("a", module["a"]), ("b", module["b"])]


def test_a_copy_of_a_model_has_its_own_handles():
    model, batches = make("blocks")
    other = copy.deepcopy(model)
    other(batches[0]).sum().backward()
    assert all(loss.take() is None for _, loss in auxiliary_losses(model))
    assert all(loss.take() is not None for _, loss in auxiliary_losses(other))
    assert all(buffer.pending().sum() == 15 for _, buffer in step_buffers(other))


def test_a_step_ends_with_its_commit():
    buffer = StepBuffer((2,), torch.int64)
    assert buffer.pending().tolist() == [0, 0]
    for n in range(3):
        buffer.add(torch.tensor([1, n]))
    pending = buffer.pending()
    assert pending.tolist() == [3, 3] and buffer.value.tolist() == [0, 0]
    pending *= 2  # reduced over two ranks
    assert buffer.pending().tolist() == [3, 3]
    value = buffer.value
    buffer.commit(pending)
    assert buffer.value is value and value.tolist() == [6, 6] and buffer.pending().tolist() == [0, 0]
    buffer.add(torch.tensor([1, 1]))
    buffer.discard()
    assert buffer.pending().tolist() == [0, 0] and buffer.value.tolist() == [6, 6]


def test_what_is_added_is_neither_kept_nor_changed_nor_differentiated():
    buffer, delta = StepBuffer((2,), torch.float32), torch.ones(2, requires_grad=True)
    buffer.add(delta)
    buffer.add(delta)
    assert delta.tolist() == [1, 1] and not buffer.pending().requires_grad and buffer.pending().tolist() == [2, 2]
    buffer.commit(delta)
    assert not buffer.value.requires_grad and buffer.value.tolist() == [1, 1]


@pytest.mark.parametrize("saved", [True, False])
def test_only_the_value_is_in_a_checkpoint(saved):
    buffer = StepBuffer((2,), torch.float32, saved=saved)
    buffer.add(torch.ones(2))
    assert list(buffer.state_dict()) == (["value"] if saved else [])
    assert [name for name, _ in buffer.named_buffers()] == ["value"]


def test_from_the_meta_device():
    with torch.device("meta"):
        counts, mean = StepBuffer((2,), torch.int64), StepBuffer((2,), torch.float32)
        both = nn.ModuleList([counts, mean])
        counts.add(torch.ones(2, dtype=torch.int64))
    both.to_empty(device="cpu").to(torch.bfloat16)
    assert counts.value.dtype is torch.int64 and mean.value.dtype is torch.bfloat16
    counts.value.zero_()
    assert counts.pending().tolist() == [0, 0] and counts.pending().device.type == "cpu"
    counts.add(torch.ones(2, dtype=torch.int64))
    counts.commit(counts.pending())
    assert counts.value.tolist() == [1, 1]


def test_an_update_has_the_buffer_s_shape_and_kind():
    buffer = StepBuffer((2,), torch.int64)
    for call in (buffer.add, buffer.commit):
        with pytest.raises(LayoutError, match=r"shape \[2\] got an update of shape \[1\]"):
            call(torch.ones(1, dtype=torch.int64))
        with pytest.raises(RuntimeError, match="can't be cast"):
            call(torch.ones(2))


def test_a_load_counter_keeps_the_last_step():
    counter = LoadCounter(3)
    assert counter.latest is None and counter.value.dtype is torch.int64 and list(counter.state_dict()) == ["value"]
    for step in (1, 2):
        counter.add(torch.tensor([step, 0, 1]))
        counter.add(torch.tensor([0, 1, 1]))
        counter.commit(counter.pending())
        assert counter.latest.tolist() == [step, 1, 2] and counter.pending().tolist() == [0, 0, 0]
    assert counter.value.tolist() == [3, 2, 4]
    counter.discard()
    assert counter.latest.tolist() == [2, 1, 2], "a skipped step is no step"
    with pytest.raises(LayoutError, match="shape"):
        counter.commit(torch.ones(2, dtype=torch.int64))
    assert counter.latest.tolist() == [2, 1, 2]
    assert counter.to("meta").latest is None
