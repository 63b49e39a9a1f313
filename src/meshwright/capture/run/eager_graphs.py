"""A layer's graphs, run eagerly on static tensors: the computations that the backend `cuda` captures.

If a run with graphs differs from one without, this backend tells whether static tensors are at fault, or capturing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.capture.run.backend import (
    CapturedLayer,
    LayerGraphs,
    Times,
    contributing,
    deferring,
    reached,
    store_sums,
)
from meshwright.capture.run.call import flatten
from meshwright.capture.run.private import using_parameters
from meshwright.capture.run.static_tensors import Static
from meshwright.nn.step_handles import StepHandle


class EagerGraphs(LayerGraphs):
    """Computations of one layer and instance on static tensors.

    Args:
        layer: the layer.
        backwards: number of the first forward's backwards to capture; each micro-batch runs one of them.
    """

    def __init__(self, layer: CapturedLayer, *, backwards: int) -> None:
        self._layer, self._backwards = layer, backwards
        self._remaining = 0
        """Backwards that still follow the last forward."""
        self._weights, self._replacements = layer.weights.trained(), layer.weights.replacements()
        self._position = {id(weight): at for at, weight in enumerate(self._weights)}
        self._stored: dict[str, list[int]] = {}
        self._leaves: list[Tensor] = []
        self._roots: list[Tensor] = []
        self._deferred: list[tuple[int, Callable[..., Tensor | None], tuple[Tensor, ...]]] = []
        self._positions: list[int] = []
        self.contributions: dict[StepHandle, Tensor] = {}
        self.reaches: list[frozenset[int]] = []

    def forward(self, inputs: Sequence[Static], outputs: Sequence[Static]) -> None:
        """Run the forward."""
        sources, targets = [one.read() for one in inputs], [one.hold() for one in outputs]
        self.run("forward", lambda: self._forward(sources, targets))

    def backward(
        self, gradients: Sequence[Static | None], found: Sequence[Static | None], *, defers: bool
    ) -> Sequence[int]:
        """Run the backward."""
        given = [one.read() for one in gradients if one is not None]
        targets = [one.hold() for one in found if one is not None]
        name = "split backward" if defers else "backward"
        self.run(name, lambda: self._backward(name, given, targets, defers=defers))
        return self._stored[name]

    def deferred(self) -> list[int]:
        """Return the positions of the deferred weights."""
        return self._positions

    def weights(self) -> None:
        """Compute the deferred weight gradients."""
        self.run("weights", self._compute_deferred)

    def finish(self) -> None:
        """Do nothing: what comes later overwrites what it needs."""

    def times(self) -> Times | None:
        """Return None: the layer runs eagerly either way."""
        return None

    @torch.no_grad()
    def run(self, name: str, computation: Callable[[], None]) -> None:
        """Run one of the computations, or its graph."""
        computation()

    def run_without_trace(self, sources: Sequence[Tensor]) -> None:
        """Run forward and backward, on gradients of zero."""
        with contributing(self._layer.handles), deferring(self._layer.store, False):
            roots = self._differentiable(sources)
            self._differentiate(roots, [torch.zeros_like(root) for root in roots], keeps=False)

    def _forward(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        with contributing(self._layer.handles) as self.contributions:
            results = self._results(sources)
            for target, result in zip(targets, results, strict=True):
                target.detach().copy_(result.detach())
        self._roots = [one for one in results if one.requires_grad]
        self.reaches = reached(self._roots, [*self._wanted(), *self._weights])
        self._remaining, self._backwards = self._backwards, 1

    def _backward(self, name: str, given: Sequence[Tensor], targets: Sequence[Tensor], *, defers: bool) -> None:
        self._remaining -= 1
        with deferring(self._layer.store, defers) as entries:
            of_inputs, self._stored[name] = self._differentiate(self._roots, given, keeps=self._remaining > 0)
            for target, gradient in zip(targets, of_inputs, strict=True):
                target.zero_() if gradient is None else target.copy_(gradient)
        if defers:
            self._deferred = [(self._position[id(one.parameter)], one.compute, one.tensors) for one in entries]
            self._positions = [position for position, _, _ in self._deferred]
        if not self._remaining:
            self._roots, self._leaves = [], []

    def _compute_deferred(self) -> None:
        store_sums(self._layer.gradients, ((at, compute(*tensors)) for at, compute, tensors in self._deferred))
        self._deferred = []

    def _wanted(self) -> list[Tensor]:
        return [leaf for leaf in self._leaves if leaf.requires_grad]

    def _differentiable(self, sources: Sequence[Tensor]) -> list[Tensor]:
        return [one for one in self._results(sources) if one.requires_grad]

    def _results(self, sources: Sequence[Tensor]) -> list[Tensor]:
        """Run the forward on static inputs; returns the results, the output first."""
        observed = self._layer.observed
        pairs = zip(sources, observed.inputs, strict=True)
        self._leaves = [one.detach().requires_grad_(facts.requires_grad) for one, facts in pairs]
        with torch.enable_grad(), using_parameters(self._layer.module, self._replacements):
            results: list[Tensor] = flatten(self._layer.run(self._leaves))[1]
        return [results[at] for at in observed.order()]

    def _differentiate(
        self, roots: Sequence[Tensor], given: Sequence[Tensor], *, keeps: bool
    ) -> tuple[list[Tensor | None], list[int]]:
        """Run the backward and store weight gradients; returns the gradients of the inputs, and stored positions."""
        wanted = self._wanted()
        with using_parameters(self._layer.module, self._replacements):
            found: Any = torch.autograd.grad(
                roots, [*wanted, *self._weights], list(given), allow_unused=True, retain_graph=keeps
            )
        of_weights = {at: one for at, one in enumerate(found[len(wanted) :]) if one is not None}
        for at, gradient in of_weights.items():
            self._layer.gradients.store(at, gradient)
        return list(found[: len(wanted)]), list(of_weights)
