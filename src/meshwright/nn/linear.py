"""A linear layer that can defer its weight gradient (see `nn/deferred_weight_gradients.py`).

The layer saves the two factors of the weight gradient. The bias gradient needs no matrix product and is not deferred.

Shapes: d input features, e output features, … any leading dims.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.nn.deferred_weight_gradients import WeightGradStore


class Linear(nn.Linear):
    """Linear layer `x @ weight.T + bias` whose backward can defer the weight gradient to `weight_gradients`."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.weight_gradients: WeightGradStore | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map […, d] to […, e]."""
        if self.weight_gradients is None or not torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias)
        inputs = (x, self.weight, self.bias, self.weight_gradients)
        out: Tensor = _DeferringLinear.apply(*inputs)  # type: ignore[no-untyped-call]
        return out

    def deferred_parameters(self) -> Iterable[nn.Parameter]:
        """Return the weight, unless it was removed, as from layers of another pipeline stage."""
        return [parameter for name, parameter in self.named_parameters(recurse=False) if name == "weight"]


class _DeferringLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, store: WeightGradStore) -> Tensor:
        ctx.save_for_backward(x)
        # The parameter itself: a saved tensor would be detached under recomputation, and its `.grad` lost.
        ctx.weight, ctx.store = weight, store
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (gradient,) = gradients
        (x,), weight = ctx.saved_tensors, ctx.weight
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_x = gradient @ weight if needs_x else None
        grad_weight = None
        if needs_weight and ctx.store.defers:
            ctx.store.put(weight, _weight_gradient, x, gradient)
        elif needs_weight:
            grad_weight = _weight_gradient(x, gradient)
        grad_bias = gradient.flatten(0, -2).sum(0) if needs_bias else None
        return grad_x, grad_weight, grad_bias, None


def _weight_gradient(x: Tensor, gradient: Tensor) -> Tensor:
    """Return the weight gradient [e, d]."""
    return gradient.flatten(0, -2).T @ x.flatten(0, -2)
