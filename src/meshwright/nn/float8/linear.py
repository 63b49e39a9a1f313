"""A linear layer whose three matrix products run in float8 (Micikevicius et al. 2022).

    y = x8 @ w8ᵀ        grad_x = g8 @ w8        grad_w = g8ᵀ @ x8

Inputs and weights are cast to e4m3, gradients to e5m2. Parameters, outputs and gradients have the dtypes of
`nn.linear.Linear`. The layer saves its input in float8, and can defer its weight gradient.

Shapes: d input features, e output features, … any leading dims.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.nn.deferred_weight_gradients import WeightGradStore
from meshwright.nn.float8.amax import AmaxSlot, LayerSlots
from meshwright.nn.float8.scaling import E4M3, E5M2, Float8Values, amax_of, cast, scale_for, scaled_cast
from meshwright.nn.linear import Linear
from meshwright.nn.private import has_scaled_mm, scaled_mm


class Float8Linear(Linear):
    """Linear layer `x @ weight.T + bias` with products in float8 and the parameters of `Linear`."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.slots: LayerSlots | None = None
        """Amax history of delayed scaling; None for current scaling."""
        self.cached: Float8Values | None = None
        """Weight in float8, for all forwards and backwards of a training step; None to cast it in each of them."""

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> Float8Linear:
        """Return a float8 layer with the parameters of another layer."""
        with torch.device("meta"):
            layer = cls(linear.in_features, linear.out_features)
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer.train(linear.training)

    @torch.no_grad()
    def refresh_cached_weight(self, weight: Tensor) -> None:
        """Cast the weight for the coming step, in place from the second call on; call before its first forward.

        Its scale is that of the current weight, which no history changes.

        Args:
            weight: the whole weight in the compute dtype; the layer's own may be sharded between steps.
        """
        values = cast(weight, scale_for(amax_of(weight), E4M3), E4M3)
        if self.cached is None:
            self.cached = values
            return
        for old, new in zip(self.cached, values, strict=True):
            old.copy_(new)

    def forward(self, x: Tensor) -> Tensor:
        """Map […, d] to […, e]."""
        records = self.training and torch.is_grad_enabled()
        # Between steps, weights have changed: validation casts them, and leaves the cached ones alone.
        casts = _Casts(self.slots, self.cached if self.training else None, records)
        out: Tensor = _Float8Linear.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, casts, self.weight_gradients
        )
        return out


class _Casts(NamedTuple):
    """How one forward and its backward cast."""

    slots: LayerSlots | None
    weight: Float8Values | None
    """The cached weight."""
    records: bool

    def slot(self, name: str) -> AmaxSlot | None:
        return None if self.slots is None else getattr(self.slots, name)


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        casts: _Casts,
        store: WeightGradStore | None,
    ) -> Tensor:
        x8, _ = scaled_cast(x.flatten(0, -2), E4M3, casts.slot("input"), records=casts.records)
        w8, scale = casts.weight, None
        if w8 is None:
            w8, scale = scaled_cast(weight, E4M3, casts.slot("weight"), records=casts.records)
        # The weight is cast again with the same scale, since its float8 copy would be saved once per micro-batch.
        ctx.save_for_backward(*(x8 if ctx.needs_input_grad[1] else (None, None)), scale)
        # The parameter itself: a saved tensor would be detached under recomputation, and its `.grad` lost.
        ctx.weight, ctx.casts, ctx.store, ctx.shape = weight, casts, store, x.shape
        out = product(x8, w8.T, x.dtype, fast=True)
        return (out if bias is None else out + bias).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0].flatten(0, -2)
        *x8, scale = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        weight, casts = ctx.weight, ctx.casts
        g8, _ = scaled_cast(gradient, E5M2, casts.slot("gradient"), records=casts.records)
        grad_x = grad_weight = None
        if needs_x:
            w8 = cast(weight, scale, E4M3) if casts.weight is None else casts.weight
            grad_x = product(g8, w8, gradient.dtype).view(ctx.shape)
        if needs_weight:
            compute: Callable[..., Tensor] = partial(_weight_gradient, dtype=weight.dtype)
            if ctx.store is not None and ctx.store.defers:
                ctx.store.put(weight, compute, *x8, *g8)
            else:
                grad_weight = compute(*x8, *g8)
        return grad_x, grad_weight, gradient.sum(0) if needs_bias else None, None, None


def _weight_gradient(x: Tensor, inverse_x: Tensor, g: Tensor, inverse_g: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return the weight gradient [e, d]."""
    return product(Float8Values(g.T, inverse_g), Float8Values(x, inverse_x), dtype)


def product(a: Float8Values, b: Float8Values, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """Return the product of `a` [n, k] and `b` [k, m] in `dtype`.

    Args:
        a: first matrix.
        b: second matrix.
        dtype: dtype of the result.
        fast: on GPUs, accumulate less precisely and faster, as is usual in forwards.
    """
    out: Tensor = float8_mm(a.data, b.data, a.inverse, b.inverse, dtype, fast)
    return out


@torch.library.custom_op("meshwright::float8_mm", mutates_args=())
def float8_mm(a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """Return `(a @ b) · inverse_a · inverse_b`, by float8 products where the device has them, else in float32."""
    if has_scaled_mm(a.device):
        return scaled_mm(a, b, inverse_a, inverse_b, dtype, fast=fast)
    return (a.to(torch.float32) @ b.to(torch.float32) * (inverse_a * inverse_b)).to(dtype)


@float8_mm.register_fake
def _(a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)
