"""Delayed scaling: bitwise an emulation that keeps its own history, over many steps; one flat tensor for all layers."""

from __future__ import annotations

import pytest
import torch

from meshwright.features.float8.linear import SLOTS_PER_LAYER, AmaxHistory, Float8Linear

NUM_STEPS, LENGTH, PARTS = 50, 5, 2
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def multiplied(a, b, inverse_a, inverse_b):
    rows, columns = a.contiguous(), b.T.contiguous().T
    return torch._scaled_mm(rows, columns, scale_a=inverse_a, scale_b=inverse_b, out_dtype=torch.float32)


class Emulated:
    """A linear layer with delayed scaling, written without any of ours: lists of floats, and plain casts."""

    def __init__(self, weight):
        self.weight = weight
        self.past = {name: [] for name in "xwg"}
        self.now = dict.fromkeys("xwg", 0.0)

    def cast(self, name, x, dtype):
        amax = float(x.abs().max())
        self.now[name] = max(self.now[name], amax)
        known = max(self.past[name][-LENGTH:], default=0.0) or amax
        scale = torch.tensor(LARGEST[dtype] / known, dtype=torch.float64).float()
        return torch.clamp(x * scale, -LARGEST[dtype], LARGEST[dtype]).to(dtype), 1 / scale

    def step(self, x, g):
        (x8, sx), (w8, sw) = self.cast("x", x, torch.float8_e4m3fn), self.cast("w", self.weight, torch.float8_e4m3fn)
        g8, sg = self.cast("g", g, torch.float8_e5m2)
        return multiplied(x8, w8.T, sx, sw), multiplied(g8, w8, sg, sw), multiplied(g8.T, x8, sg, sx)

    def end_step(self):
        for name, amax in self.now.items():
            self.past[name].append(amax)
            self.now[name] = 0.0


def run_both(*, fault=None):
    """Yield what both compute, part by part of all steps."""
    torch.manual_seed(0)
    layer = Float8Linear(32, 16)
    history = AmaxHistory(2, length=LENGTH, device=torch.device("cpu"))
    layer.slots = history.slots(1)
    weight = layer.weight.detach().clone()
    emulated = Emulated(weight)
    for step in range(NUM_STEPS):
        for _ in range(PARTS):
            size = 2.0 ** (4 * torch.randn(2))
            x, g = (torch.randn(8, 32) * size[0]).requires_grad_(), torch.randn(8, 16) * size[1]
            layer.zero_grad()
            y = layer(x)
            y.backward(g)
            yield (y.detach(), x.grad, layer.weight.grad), emulated.step(x.detach(), g)
        if fault != "never" and not (fault == "missed" and step == 20):
            history.advance()
        if fault == "early":
            history.history[-1].zero_()
            history.refresh()
        emulated.end_step()
        with torch.no_grad():
            layer.weight.mul_(1.1)
        weight.mul_(1.1)


def test_it_is_bitwise_the_emulation_over_fifty_steps():
    for number, (found, expected) in enumerate(run_both()):
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other), number


@pytest.mark.parametrize("fault", ["never", "missed", "early"])
def test_the_emulation_catches_a_history_that_moves_wrongly(fault):
    pairs = [
        (one, other) for found, expected in run_both(fault=fault) for one, other in zip(found, expected, strict=True)
    ]
    assert not all(torch.equal(one, other) for one, other in pairs)


def test_all_slots_are_views_of_one_tensor_and_stay_where_they_are():
    history = AmaxHistory(3, length=4, device=torch.device("cpu"))
    slots = [slot for layer in range(3) for slot in history.slots(layer)]
    addresses = [(slot.amax.data_ptr(), slot.known.data_ptr()) for slot in slots]
    assert len({amax for amax, _ in addresses}) == 3 * SLOTS_PER_LAYER == history.amax.numel()
    for number, slot in enumerate(slots):
        slot.record(torch.tensor(float(number)))
    assert history.amax.tolist() == list(range(9))
    history.advance()
    assert history.known.tolist() == list(range(9)) and history.amax.eq(0).all()
    assert [(slot.amax.data_ptr(), slot.known.data_ptr()) for slot in slots] == addresses


def test_what_is_not_finite_leaves_no_trace():
    history = AmaxHistory(1, length=2, device=torch.device("cpu"))
    history.amax.copy_(torch.tensor([torch.inf, torch.nan, 2.0]))
    history.advance()
    assert history.known.tolist() == [0, 0, 2]


def test_a_skipped_step_leaves_the_history_as_it_was():
    history = AmaxHistory(1, length=2, device=torch.device("cpu"))
    history.amax.fill_(3)
    history.advance()
    before = history.history.clone()
    history.amax.fill_(9)
    history.discard()
    assert torch.equal(history.history, before) and history.amax.eq(0).all() and history.known.eq(3).all()
