"""A linear layer that can defer its weight gradient, which splits the backward in two (Qi et al. 2024, "Zero bubble
pipeline parallelism").

Splitting an existing autograd graph would run Python autograd Functions twice, and recompute a checkpointed block once
per layer. Instead, layers save the two factors of the weight gradient to multiply them later; everything else in the
backward runs once. Any layer can participate by implementing `DefersWeightGradients`.

Shapes: d input features, e output features, … any leading dims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
        """Return the weight, unless it was removed, as on pipeline stages that pass the layer's input on."""
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
        grad_weight = computed_or_deferred(ctx.store, weight, _weight_gradient, x, gradient) if needs_weight else None
        grad_bias = gradient.flatten(0, -2).sum(0) if needs_bias else None
        return grad_x, grad_weight, grad_bias, None


def _weight_gradient(x: Tensor, gradient: Tensor) -> Tensor:
    """Return the weight gradient [e, d]."""
    return gradient.flatten(0, -2).T @ x.flatten(0, -2)


class DeferredGradient(NamedTuple):
    """A parameter's gradient, to be computed later as `compute(*tensors)`."""

    parameter: nn.Parameter
    compute: Callable[..., Tensor | None]
    """Returns the gradient, or None after it has accumulated the gradient itself."""
    tensors: tuple[Tensor, ...]


OWNER = "meshwright_owner"
"""Attribute of a local shard that a layer computes with, in place of its parameter."""


ACCUMULATE = "meshwright_accumulate"
"""Attribute of a parameter: a function to call when its `.grad` has got a deferred gradient, if not `.grad` itself
accumulates those of all micro-batches."""


class LocalShardOwner(NamedTuple):
    """The sharded parameter to which a local shard's gradient belongs."""

    parameter: nn.Parameter
    wrap: Callable[[Tensor], Tensor]
    """Convert the shard's gradient to the parameter's."""

    def converted(self, compute: Callable[..., Tensor | None], *tensors: Tensor) -> Tensor | None:
        """Return the parameter's gradient, computed from the shard's."""
        gradient = compute(*tensors)
        return None if gradient is None else self.wrap(gradient)


class WeightGradStore:
    """The deferred weight gradients of a pipeline stage."""

    def __init__(self) -> None:
        self.defers = False
        """True while backward passes should defer their weight gradients."""
        self._deferred: list[DeferredGradient] = []

    def put(self, parameter: nn.Parameter, compute: Callable[..., Tensor | None], *tensors: Tensor) -> None:
        """Store a gradient to be computed later, as `compute(*tensors)`, which holds no references to other tensors.

        An autograd Function must take the parameter, whose `.grad` receives the gradient, from its forward's arguments:
        tensors saved during recomputation are detached.
        """
        owner: LocalShardOwner | None = getattr(parameter, OWNER, None)
        if owner is not None:
            parameter, compute = owner.parameter, partial(owner.converted, compute)
        self._deferred.append(DeferredGradient(parameter, compute, tensors))

    def take(self) -> list[DeferredGradient]:
        """Return and clear the deferred gradients."""
        deferred, self._deferred = self._deferred, []
        return deferred


def computed_or_deferred(
    store: WeightGradStore | None, parameter: nn.Parameter, compute: Callable[..., Tensor], *tensors: Tensor
) -> Tensor | None:
    """Return `compute(*tensors)`, the gradient of a parameter; None if the store has put it off."""
    if store is None or not store.defers:
        return compute(*tensors)
    store.put(parameter, compute, *tensors)
    return None


@runtime_checkable
class DefersWeightGradients(Protocol):
    """A layer that can defer the gradients of its parameters.

    For each of these parameters that requires a gradient, the backward either computes the gradient or, if
    `weight_gradients` is set and its `defers` is True, stores it there for later.
    """

    weight_gradients: WeightGradStore | None
    """The store for deferred gradients, assigned by the stage; None until then."""

    def deferred_parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters with deferrable gradients; the backward computes all others, such as for biases."""


def defer_weight_gradients(module: nn.Module) -> WeightGradStore | None:
    """Let the layers of a stage defer their weight gradients.

    Returns:
        The store that the layers share; None if the backward cannot be split, because the stage has nothing to defer
        or has matrices whose gradients cannot be deferred (see `undeferred_parameters`).
    """
    layers = _deferring_layers(module)
    if not any(True for layer in layers for _ in layer.deferred_parameters()) or undeferred_parameters(module):
        return None
    store = WeightGradStore()
    for layer in layers:
        layer.weight_gradients = store
    return store


def undeferred_parameters(module: nn.Module) -> list[str]:
    """Return the names of all matrices, including frozen ones, with gradients that no layer of `module` can defer."""
    exempt = {id(parameter) for layer in _deferring_layers(module) for parameter in layer.deferred_parameters()}
    # An embedding's gradient is as cheap as a norm's, so it is computed with the input gradients.
    embeddings = (layer for layer in module.modules() if isinstance(layer, nn.Embedding))
    exempt |= {id(p) for layer in embeddings for p in layer.parameters(recurse=False)}  # another stage's has none
    return [name for name, p in module.named_parameters() if p.dim() >= 2 and id(p) not in exempt]


@torch.no_grad()
def compute_deferred(deferred: Iterable[DeferredGradient]) -> None:
    """Compute the deferred gradients in order and accumulate them into `.grad`."""
    for parameter, compute, tensors in deferred:
        gradient = compute(*tensors)
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        if (accumulate := getattr(parameter, ACCUMULATE, None)) is not None:
            accumulate()


def _deferring_layers(module: nn.Module) -> list[DefersWeightGradients]:
    return [layer for layer in module.modules() if isinstance(layer, DefersWeightGradients)]
