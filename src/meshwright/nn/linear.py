"""A linear layer that can defer the gradient of its weight (`nn/deferred_weight_gradients.py`).

It stores the pair that the gradient is the product of. The bias's gradient is not deferred: it costs no product.

Shapes: d input features, e output features, … any leading dims.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.nn.deferred_weight_gradients import WeightGradientStore


class Linear(nn.Linear):
    """`x @ weight.T + bias`; with `weight_gradients` set, backwards may defer the weight's gradient."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.weight_gradients: WeightGradientStore | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[…, d] to […, e]."""
        if self.weight_gradients is None or not torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias)
        inputs = (x, self.weight, self.bias, self.weight_gradients)
        out: Tensor = _DeferringLinear.apply(*inputs)  # type: ignore[no-untyped-call]
        return out

    def deferred_parameters(self) -> Iterable[nn.Parameter]:
        """The weight."""
        return [self.get_parameter("weight")]


class _DeferringLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, store: WeightGradientStore
    ) -> Tensor:
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
            ctx.store.put(weight, _product, x, gradient)
        elif needs_weight:
            of_weight = _product(x, gradient)
        of_bias = gradient.flatten(0, -2).sum(0) if needs_bias else None
        return of_x, of_weight, of_bias, None


def _product(x: Tensor, gradient: Tensor) -> Tensor:
    """The weight's gradient [e, d]."""
    return gradient.flatten(0, -2).T @ x.flatten(0, -2)
