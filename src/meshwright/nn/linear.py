"""A linear layer that can put the gradient of its weight off (Qi et al. 2024, "Zero bubble pipeline parallelism").

Splitting a whole backward graph afterwards runs a Python autograd Function twice and recomputes a checkpointed block
once per layer. Here the layer itself stores the pair that its weight's gradient is the product of, and the product is
run later; everything else of the backward happens once, the bias's gradient too: it costs no product.

Shapes: d input features, e output features, … any leading dims.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pair = tuple[nn.Parameter, Tensor, Tensor]
"""A weight [e, d], its input […, d], and the gradient of its output […, e]."""


class WeightGradients:
    """The weight gradients of a stage that were put off."""

    def __init__(self) -> None:
        self.defers = False
        """Whether backwards that run now put them off."""
        self._pairs: list[Pair] = []

    def put(self, pair: Pair) -> None:
        """Keep a pair for later."""
        self._pairs.append(pair)

    def take(self) -> list[Pair]:
        """What was put off since the last time."""
        pairs, self._pairs = self._pairs, []
        return pairs


@torch.no_grad()
def run_products(pairs: Iterable[Pair]) -> None:
    """Compute what was put off, into the weights' gradients."""
    for weight, x, gradient in pairs:
        product = _product(x, gradient)
        if weight.grad is None:
            weight.grad = product
        else:
            weight.grad += product


class Linear(nn.Linear):
    """`x @ weight.T + bias`; with `weight_gradients` set, backwards may put the weight's gradient off."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.weight_gradients: WeightGradients | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[…, d] to […, e]."""
        if self.weight_gradients is None or not torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias)
        inputs = (x, self.weight, self.bias, self.weight_gradients)
        out: Tensor = _DeferringLinear.apply(*inputs)  # type: ignore[no-untyped-call]
        return out


def defer_weight_gradients(module: nn.Module) -> WeightGradients | None:
    """Let the linear layers of a stage put their weights' gradients off.

    Returns:
        Where they go; None if the stage has a matrix of which that can't be done, so that its backward can't be split.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, Linear)]
    deferring = {id(layer.weight) for layer in layers}
    # A lookup's gradient is as cheap as a norm's: it stays with the gradient of the inputs.
    lookups = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Embedding)}
    matrices = {id(parameter) for parameter in module.parameters() if parameter.dim() >= 2}
    if not layers or matrices - deferring - lookups:
        return None
    store = WeightGradients()
    for layer in layers:
        layer.weight_gradients = store
    return store


class _DeferringLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, store: WeightGradients) -> Tensor:
        ctx.save_for_backward(x)
        # The parameter itself: what a recomputation saves is detached, and has no `.grad` that anybody would see.
        ctx.weight, ctx.store = weight, store
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (gradient,) = gradients
        (x,), weight = ctx.saved_tensors, ctx.weight
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        of_x = gradient @ weight if needs_x else None
        of_weight = None
        if needs_weight and ctx.store.defers:
            ctx.store.put((weight, x, gradient))
        elif needs_weight:
            of_weight = _product(x, gradient)
        of_bias = gradient.flatten(0, -2).sum(0) if needs_bias else None
        return of_x, of_weight, of_bias, None


def _product(x: Tensor, gradient: Tensor) -> Tensor:
    """The weight's gradient [e, d]."""
    return gradient.flatten(0, -2).T @ x.flatten(0, -2)
