"""A linear layer whose three matrix products run in float8 (Micikevicius et al. 2022); knows no mesh.

    y = x8 @ w8ᵀ        grad_x = g8 @ w8        grad_w = g8ᵀ @ x8

Inputs and weights are cast to e4m3, gradients to e5m2. Parameters, outputs and gradients have the dtypes of
`nn.linear.Linear`. The layer saves its input in float8, and can defer its weight gradient.

A cast multiplies a tensor by `largest float8 number / amax`, where amax is its largest magnitude or one known before,
and rounds; what exceeds the range saturates. The same arithmetic as torchao's. A non-finite amax makes every product
with the tensor NaN: its scale is 0 or NaN, so that the step is skipped instead of trained with saturated values.

Largest magnitudes of delayed scaling are all in one flat tensor: one all-reduce per step, and addresses that stay.
Layers only take maxima in place, which also works inside a CUDA graph, and in a recomputed forward, where the same
maximum changes nothing. History and scales move outside of layers, once per step. So every micro-batch of a step, and
every recomputed forward, uses the same scales.

Shapes: d input features, e output features, … any leading dims.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.features.float8.private import scaled_mm
from meshwright.nn.linear import Linear, WeightGradStore, computed_or_deferred

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
"""Formats of inputs and weights, and of gradients, which need more range than precision."""
SMALLEST_AMAX = 2.0**-100
"""Smaller magnitudes count as this one, so that scales and their inverses are normal float32 numbers."""


class AmaxSlot(NamedTuple):
    """Views of one tensor's place in the flat tensors, all scalars."""

    amax: Tensor
    """Largest magnitude in this step so far."""
    known: Tensor
    """Largest magnitude in the history; 0 before there is any."""

    def record(self, amax: Tensor) -> None:
        """Include a magnitude in this step's."""
        torch.maximum(self.amax, amax, out=self.amax)

    def choose(self, amax: Tensor) -> Tensor:
        """Return the magnitude that determines the scale of a tensor with this `amax`.

        Without a history, that is the tensor's own, instead of a scale of 1, with which small gradients would vanish.
        The choice is made on the device. A non-finite amax is never hidden.
        """
        return torch.where((self.known > 0) & amax.isfinite(), self.known, amax)


class LayerSlots(NamedTuple):
    """Slots of the tensors that a layer casts."""

    input: AmaxSlot
    weight: AmaxSlot
    gradient: AmaxSlot


SLOTS_PER_LAYER = len(LayerSlots.__annotations__)


class AmaxHistory:
    """Magnitudes of the casts of all float8 layers of a model, in this step and in earlier ones."""

    def __init__(self, num_layers: int, *, length: int, device: torch.device) -> None:
        """Create an empty history of `length` steps."""
        num_slots = num_layers * SLOTS_PER_LAYER
        self.amax = torch.zeros(num_slots, device=device)
        """Largest magnitudes in this step on this rank; 0 for layers of other ranks."""
        self.known = torch.zeros(num_slots, device=device)
        """Largest magnitudes in the history."""
        self.history = torch.zeros(length, num_slots, device=device)
        """Largest magnitudes by step, newest first."""

    def slots(self, layer: int) -> LayerSlots:
        """Return the slots of a layer, by its number in the model."""
        first = layer * SLOTS_PER_LAYER
        return LayerSlots(*(AmaxSlot(self.amax[i], self.known[i]) for i in range(first, first + SLOTS_PER_LAYER)))

    @torch.no_grad()
    def advance(self) -> None:
        """End a step: move its magnitudes, already reduced over ranks, into the history."""
        self.history.copy_(self.history.roll(1, 0))
        # What is not finite measured nothing.
        self.history[0].copy_(self.amax.nan_to_num(nan=0.0, posinf=0.0))
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Set what is known from the history, and forget this step; call after loading a history."""
        self.known.copy_(self.history.amax(0))
        self.discard()

    @torch.no_grad()
    def discard(self) -> None:
        """Forget the magnitudes of a step that was skipped."""
        self.amax.zero_()


class Float8Values(NamedTuple):
    """A tensor in float8: `data · inverse` is close to the original."""

    data: Tensor
    inverse: Tensor
    """Inverse of the scale, a float32 scalar."""

    @property
    def T(self) -> Float8Values:
        """The transposed matrix."""
        return Float8Values(self.data.T, self.inverse)


def amax_of(x: Tensor) -> Tensor:
    """Return the largest magnitude in `x`, a float32 scalar."""
    return x.detach().abs().amax().to(torch.float32)


def scale_for(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale that maps `amax` to the largest number of `dtype`, a float32 scalar."""
    # In float64, since eager and compiled divisions in float32 may differ.
    return (torch.finfo(dtype).max / amax.to(torch.float64).clamp_min(SMALLEST_AMAX)).to(torch.float32)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Float8Values:
    """Cast `x` to float8 with a given scale."""
    largest = torch.finfo(dtype).max
    data = (x.detach().to(torch.float32) * scale).clamp(-largest, largest).to(dtype)
    return Float8Values(data, scale.reciprocal())


def scaled_cast(x: Tensor, dtype: torch.dtype, slot: AmaxSlot | None, *, records: bool) -> tuple[Float8Values, Tensor]:
    """Cast `x` to float8 with the scale that its recipe chooses; return the scale, too.

    Args:
        x: tensor to cast.
        dtype: float8 format.
        slot: amax history of delayed scaling; None for current scaling.
        records: whether the tensor's amax is part of the history.
    """
    amax = amax_of(x)
    if slot is not None:
        if records:
            slot.record(amax)
        amax = slot.choose(amax)
    scale = scale_for(amax, dtype)
    return cast(x, scale, dtype), scale


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
        return self.multiply(x, self.weight)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """Map […, d] to […, e] with a given weight, the layer's or its local shard."""
        records = self.training and torch.is_grad_enabled()
        # Between steps, weights have changed: validation casts them, and leaves the cached ones alone.
        casts = _Casts(self.slots, self.cached if self.training else None, records)
        out: Tensor = _Float8Linear.apply(  # type: ignore[no-untyped-call]
            x, weight, self.bias, casts, self.weight_gradients
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
            compute = partial(_weight_gradient, dtype=weight.dtype)
            grad_weight = computed_or_deferred(ctx.store, weight, compute, *x8, *g8)
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
    return scaled_mm(a.data, b.data, a.inverse, b.inverse, dtype, fast=fast)
