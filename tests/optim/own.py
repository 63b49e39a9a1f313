"""Optimizers of a user's own, right and wrong ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshwright.optim.contract import MatrixOptimizer, Optimizer, State
from meshwright.optim.from_torch import FromTorch


class Plain(Optimizer):
    """Right: the gradient times the learning rate, and a sum per row of a matrix."""

    def states(self, role):
        return {"total": State(), "updates": State((), "float32")}

    def update(self, slots, settings):
        for slot in slots:
            slot.state["updates"].add_(1)
            slot.state["total"].add_(slot.gradient)
            slot.parameter.sub_(slot.gradient, alpha=settings.lr)


class NoOptimizer:
    pass


class NoRoles(Plain):
    roles = frozenset()


class UnknownRole(Plain):
    roles = frozenset({"matrix", "tensor"})


def stating(states):
    """A class that keeps these states."""
    return type("Stating", (Plain,), {"states": lambda self, role: states})


DottedState = stating({"a.b": State()})
UnknownDtype = stating({"total": State(dtype="float7")})
DimsOutOfOrder = stating({"total": State((1, 0))})
NoState = stating({"total": 3})
NoMapping = stating(["total"])
ColumnsOfVectors = stating({"total": State((1,))})


def updating(change):
    """A class that changes each slot so, given the learning rate."""
    update = lambda self, slots, settings: [change(slot, settings.lr) for slot in slots]  # noqa: E731
    return type("Updating", (Plain,), {"update": update})


DoesNothing = updating(lambda slot, lr: slot.parameter - lr * slot.gradient)
NotFinite = updating(lambda slot, lr: slot.parameter.div_(0.0))
ReplacesState = updating(lambda slot, lr: slot.state.update(total=slot.state["total"] + slot.gradient))
AddsState = updating(lambda slot, lr: slot.state.update(more=torch.zeros(())))
ResizesState = updating(lambda slot, lr: slot.state["total"].resize_(1))
WholeNorm = updating(lambda slot, lr: slot.parameter.sub_(slot.gradient / slot.gradient.norm(), alpha=lr))
"""Needs the norm of the whole parameter."""


class Raises(Plain):
    def update(self, slots, settings):
        raise KeyError("total")


class AsksForGrad(Plain):
    def update(self, slots, settings):
        slots[0].parameter.sub_(slots[0].grad)


class RaisesWhenMade(Plain):
    def __init__(self):
        raise RuntimeError("no licence")


class WholeState(Plain):
    """Only its state depends on the whole parameter."""

    def update(self, slots, settings):
        for slot in slots:
            slot.state["total"].fill_(slot.gradient.norm())
            slot.parameter.sub_(slot.gradient)


class CountsItself(Plain):
    """Keeps the number of updates on the object, where no checkpoint has it."""

    steps = 0

    def update(self, slots, settings):
        self.steps += 1
        for slot in slots:
            slot.parameter.sub_(slot.gradient, alpha=settings.lr / self.steps)


class DividesByNumber(Plain):
    def update(self, slots, settings):
        for slot in slots:
            slot.parameter.sub_(slot.gradient, alpha=settings.lr / len(slots))


class LargestFirst(Plain):
    """Fails on a shard without elements."""

    def update(self, slots, settings):
        for slot in slots:
            assert slot.gradient.abs().max() >= 0
            slot.parameter.sub_(slot.gradient, alpha=settings.lr)


@dataclass
class Dataclass(Plain):
    """Right, but can't be a key."""

    scale: float = 0.5

    def update(self, slots, settings):
        for slot in slots:
            slot.state["total"].lerp_(slot.gradient, self.scale)
            slot.parameter.sub_(slot.state["total"], alpha=settings.lr)


class NarrowState(Dataclass):
    """Right: a state in float32 whatever the parameters are, except in float64."""

    def states(self, role):
        return {"total": State(dtype="float32")}


class Rows(Plain):
    """Right where rows are whole: a sum per row."""

    def states(self, role):
        return {"total": State((0,))}

    def update(self, slots, settings):
        for slot in slots:
            others = tuple(range(1, slot.gradient.dim()))
            slot.state["total"].add_(slot.gradient.sum(others) if others else slot.gradient)
            slot.parameter.sub_(slot.gradient, alpha=settings.lr)


class Whole(MatrixOptimizer):
    """Right: gradients divided by the norm of the whole matrix."""

    def states(self, role):
        return {}

    def prepare(self, slot, settings):
        return slot.gradient.clone()

    def transform(self, matrices):
        return matrices / matrices.square().sum((-2, -1), keepdim=True).sqrt()

    def apply(self, slot, update, settings):
        slot.parameter.sub_(update, alpha=settings.lr)


class TogetherNormed(Whole):
    """The norm of all matrices that come together."""

    def transform(self, matrices):
        return matrices / matrices.norm()


class Transposes(Whole):
    def transform(self, matrices):
        return matrices.mT


class PreparesRows(Whole):
    def prepare(self, slot, settings):
        return slot.gradient.sum(0)


class PreparesItself(Whole):
    def prepare(self, slot, settings):
        return slot.parameter


class PreparesByNorm(Whole):
    def prepare(self, slot, settings):
        return slot.gradient / slot.gradient.norm()


class WholeVectors(Whole):
    roles = frozenset({"vector"})


def adagrad():
    """PyTorch's, unchanged."""
    states = {"step": State((), "float32"), "sum": State()}
    return FromTorch(lambda parameters, s: torch.optim.Adagrad(parameters, s.lr), states)


def lacks_a_state():
    """PyTorch's Adam, without its second moment."""
    states = {"step": State((), "float32"), "exp_avg": State()}
    return FromTorch(lambda parameters, s: torch.optim.Adam(parameters, s.lr), states)
