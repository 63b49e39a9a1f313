"""Drive a rank's captured layers through the events of a plan, and eager copies of them beside."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from itertools import groupby
from unittest.mock import patch

import torch
from torch import Tensor, nn

from meshwright.capture.lifetimes import follows_another
from meshwright.capture.run import capture as capture_module
from meshwright.capture.run.capture import capture, observe
from meshwright.nn.linear import Linear, compute_deferred, defer_weight_gradients
from meshwright.pipeline.actions import BACKWARDS, ActionKind

K = ActionKind


class SavesOutput(torch.autograd.Function):
    """Identity on `y` whose backward reads it, and passes its gradient on as it is."""

    @staticmethod
    def forward(ctx, y, x):
        ctx.save_for_backward(y)
        ctx.shape = x.shape
        return y.view_as(y)

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient, (y.mean() * gradient.mean()).expand(ctx.shape)


class Layer(nn.Module):
    """A layer of a signature's shapes, with an argument that scales, and further results if it has any."""

    def __init__(self, signature):
        super().__init__()
        self.signature = signature
        self.first = Linear(signature.input.shape[-1], 8)
        self.second = Linear(8, signature.output.shape[-1])

    def forward(self, x, *arguments):
        h = torch.nn.functional.silu(self.first(x))
        for argument in arguments:
            h = h * argument[:, None, :1]
        y = self.second(h)
        y = SavesOutput.apply(y, x) if self.signature.saves_output else y
        return (
            (y, *(y.mean(-1) * (at + 2) for at, _ in enumerate(self.signature.results)))
            if self.signature.results
            else y
        )


@dataclass
class Copy:
    """The layers of one side, and what has become of their micro-batches."""

    layers: dict[int, list[nn.Module]]
    run: object
    stores: dict[int, object]
    inputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    outputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    deferred: dict[tuple[int, int], list] = field(default_factory=dict)
    seen: list[tuple[str, Tensor]] = field(default_factory=list)
    """Named values in the order in which they appeared."""


class Bench:
    """Captured layers of a plan, and equal ones that run eagerly.

    Args:
        plan: the plan; it is not verified.
        edit: changes the runner before the first step.
        backend: of `capture`.
        options: of `capture`.
    """

    def __init__(self, plan, *, edit=None, backend="simulate", **options):
        torch.manual_seed(0)
        self.plan = plan
        dtype = getattr(torch, plan.buffers[0].dtype)
        layers = {stage: [Layer(one).to(dtype) for one in own] for stage, own in plan.chunks}
        eager = copy.deepcopy(layers)
        splits = any(event.kind is K.BACKWARD_WEIGHT for event in plan.events)
        stores, eager_stores = (
            {stage: defer_weight_gradients(nn.ModuleList(own)) for stage, own in side.items() if own and splits}
            for side in (layers, eager)
        )
        observed = observe(layers, {stage: self._samples(stage) for stage in layers})
        with patch.object(capture_module, "verify_capture", lambda plan: None):
            runner = capture(observed, plan, backend=backend, stores=stores, **options)
        self.runner = runner
        if edit is not None:
            edit(runner)
        self.captured = Copy(layers, lambda s, at, m, *args: runner((s, at), m, *args), stores)
        self.eager = Copy(eager, lambda s, at, m, *args: eager[s][at](*args), eager_stores)

    def step(self, number: int = 0) -> None:
        """Run a step on both sides, event by event, and check every value against the eager one.

        Raises:
            AssertionError: values differ.
        """
        keys = ((e.kind, e.stage, e.microbatch) for e in self.plan.events)
        for kind, stage, m in (key for key, _ in groupby(keys) if dict(self.plan.chunks)[key[1]]):
            for side in (self.captured, self.eager):
                side.seen.clear()
                self._act(side, kind, stage, m, number)
            self._compare()
        for stage, own in self.captured.layers.items():
            for one, other in zip(own, self.eager.layers[stage], strict=True):
                for p, q in zip(one.parameters(), other.parameters(), strict=True):
                    assert p.grad is not None and torch.equal(p.grad, q.grad), "a gradient differs"

    def update(self) -> None:
        """Take a gradient step on both sides, and forget the gradients."""
        for side in (self.captured, self.eager):
            for parameter in (p for own in side.layers.values() for one in own for p in one.parameters()):
                with torch.no_grad():
                    parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None

    def _compare(self) -> None:
        for (name, one), (_, other) in zip(self.captured.seen, self.eager.seen, strict=True):
            assert torch.equal(one, other), f"{name} differs"

    def _act(self, side, kind, stage, m, number) -> None:
        if kind is K.FORWARD:
            self._forward(side, stage, m, number)
        elif kind in BACKWARDS:
            generator = torch.Generator().manual_seed(number * 1000 + stage * 100 + m + 7)
            y, store = side.outputs[stage, m], side.stores.get(stage)
            gradient = torch.randn(y.shape, generator=generator).to(y.dtype)
            if store is not None:
                store.defers = kind is K.BACKWARD_INPUT
            torch.autograd.backward(y, gradient)
            if store is not None:
                store.defers = False
                side.deferred[stage, m] = store.take()
            side.seen.append((f"the gradient of stage {stage}'s input, micro-batch {m}", side.inputs[stage, m].grad))
        elif kind is K.BACKWARD_WEIGHT:
            compute_deferred(side.deferred.pop((stage, m)))
        elif kind in (K.FREE_OUTPUT, K.FREE_INPUT_GRADIENT):
            kept = side.outputs[stage, m] if kind is K.FREE_OUTPUT else side.inputs[stage, m].grad
            side.seen.append((f"what is sent of stage {stage}, micro-batch {m},", kept.detach()))

    def _forward(self, side, stage, m, number) -> None:
        generator = torch.Generator().manual_seed(number * 1000 + stage * 100 + m)
        layers = dict(self.plan.chunks)[stage]
        dtype = getattr(torch, layers[0].input.dtype)
        x = torch.randn(layers[0].input.shape, generator=generator).to(dtype).requires_grad_()
        side.inputs[stage, m] = x
        # Autograd keeps gradients of what it is given; a static tensor must reach it as an alias.
        h, arguments = x.view_as(x), {}
        for at, layer in enumerate(layers):
            if at and not follows_another(layers, at):
                h = (h * 1.01).sin()
            for one in layer.arguments:
                value = torch.randn(one.tensor.shape, generator=generator).to(getattr(torch, one.tensor.dtype))
                arguments.setdefault(one.number, value.requires_grad_(one.has_gradient))
            found = side.run(stage, at, m, h, *(arguments[one.number] for one in layer.arguments))
            h, *others = found if isinstance(found, tuple) else (found,)
            for other in others:
                h = h + other.unsqueeze(-1) if at + 1 == len(layers) or not layers[at + 1].follows else h
        side.outputs[stage, m] = h
        side.seen.append((f"the output of stage {stage}, micro-batch {m},", h.detach()))

    def _samples(self, stage) -> list[tuple[Tensor | None, ...]]:
        arguments, found = {}, []
        for at, layer in enumerate(dict(self.plan.chunks)[stage]):
            own = [_zeros(layer.input)] if at == 0 or not follows_another(dict(self.plan.chunks)[stage], at) else [None]
            for one in layer.arguments:
                arguments.setdefault(one.number, _zeros(one.tensor).requires_grad_(one.has_gradient))
            found.append((*own, *(arguments[one.number] for one in layer.arguments)))
        return found


def _zeros(signature) -> Tensor:
    dtype = getattr(torch, signature.dtype)
    return torch.zeros(signature.shape, dtype=dtype, requires_grad=dtype.is_floating_point)
