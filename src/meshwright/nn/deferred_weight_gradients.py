"""Deferral of weight gradients (Qi et al. 2024, "Zero bubble pipeline parallelism"): backwards split in two.

Splitting a whole backward graph afterwards runs a Python autograd Function twice and recomputes a checkpointed block
once per layer. Here a layer itself stores what its parameter's gradient is computed from, and that is run later;
everything else of the backward happens once. Any layer can do so: it implements `DefersWeightGradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


class DeferredGradient(NamedTuple):
    """A parameter's gradient that is not computed yet: `compute(*tensors)`."""

    parameter: nn.Parameter
    compute: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]


class WeightGradientStore:
    """The weight gradients of a stage that were deferred."""

    def __init__(self) -> None:
        self.defers = False
        """Whether backwards that run now defer them."""
        self._deferred: list[DeferredGradient] = []

    def put(self, parameter: nn.Parameter, compute: Callable[..., Tensor], *tensors: Tensor) -> None:
        """Keep for later what `compute(*tensors)` makes a gradient of.

        Args:
            parameter: the one that a backward without deferral would give the gradient to; an autograd Function takes
                it from its forward's arguments, since what a recomputation saves is detached.
            compute: a function that holds no tensors itself.
            tensors: all that it needs; they live until it runs.
        """
        self._deferred.append(DeferredGradient(parameter, compute, tensors))

    def take(self) -> list[DeferredGradient]:
        """What was deferred since the last time."""
        deferred, self._deferred = self._deferred, []
        return deferred


@runtime_checkable
class DefersWeightGradients(Protocol):
    """A layer that can defer gradients of its parameters.

    In each backward, and for each of these parameters that needs a gradient, it computes it or, if `weight_gradients`
    is set and `defers`, puts it there instead.
    """

    weight_gradients: WeightGradientStore | None
    """Where they go; None until a stage gives the layer one."""

    def deferred_parameters(self) -> Iterable[nn.Parameter]:
        """Those whose gradients it defers; all others' come with the inputs' gradients, as a bias's does."""


def defer_weight_gradients(module: nn.Module) -> WeightGradientStore | None:
    """Let the layers of a stage defer their weights' gradients.

    Returns:
        Where they go; None if there are none to defer, or the stage has a matrix of which that can't be done
        (`undeferred_parameters` names it), so that its backward can't be split.
    """
    layers = _deferring_layers(module)
    if not any(True for layer in layers for _ in layer.deferred_parameters()) or undeferred_parameters(module):
        return None
    store = WeightGradientStore()
    for layer in layers:
        layer.weight_gradients = store
    return store


def undeferred_parameters(module: nn.Module) -> list[str]:
    """Names of the matrices, frozen ones too, whose gradients no layer of `module` defers."""
    free = {id(parameter) for layer in _deferring_layers(module) for parameter in layer.deferred_parameters()}
    # A lookup's gradient is as cheap as a norm's: it stays with the gradient of the inputs.
    free |= {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Embedding)}
    return [name for name, one in module.named_parameters() if one.dim() >= 2 and id(one) not in free]


@torch.no_grad()
def compute_deferred(deferred: Iterable[DeferredGradient]) -> None:
    """Compute what was deferred, into the parameters' gradients, in the order of the backward."""
    for parameter, compute, tensors in deferred:
        gradient = compute(*tensors)
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad += gradient


def _deferring_layers(module: nn.Module) -> list[DefersWeightGradients]:
    return [layer for layer in module.modules() if isinstance(layer, DefersWeightGradients)]
