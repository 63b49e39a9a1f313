"""Interface of a backend: the graphs of one layer, captured and replayed.

A backend knows how a graph is captured and replayed, and nothing of which micro-batch or buffer it is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from meshwright.capture.plan import Graph
from meshwright.capture.run.call import rebuild
from meshwright.capture.run.observe import Observation
from meshwright.capture.run.static_tensors import Static
from meshwright.capture.run.static_weights import StaticWeights
from meshwright.capture.run.weight_gradients import WeightGradients
from meshwright.errors import CaptureError
from meshwright.nn.deferred_weight_gradients import DeferredGradient, WeightGradStore
from meshwright.nn.step_handles import StepHandle


@dataclass(frozen=True)
class CapturedLayer:
    """A layer to capture."""

    stage: int
    number: int
    """Number among the captured layers of its chunk."""
    name: str
    module: nn.Module
    forward: Callable[..., Any]
    """The module's forward."""
    observed: Observation
    weights: StaticWeights
    gradients: WeightGradients
    store: WeightGradStore | None
    """Store of deferred weight gradients of its stage, if backwards are split."""

    @property
    def handles(self) -> list[StepHandle]:
        """Step handles in the layer, whose contributions are results of its graphs."""
        return [one for one in self.module.modules() if isinstance(one, StepHandle)]

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """Run the forward on the tensors among its arguments."""
        args, named = rebuild(self.observed.arguments, tensors)
        return self.forward(*args, **named)


@contextmanager
def deferring(store: WeightGradStore | None, defers: bool) -> Iterator[list[DeferredGradient]]:
    """Yield a list that gets the weight gradients deferred within the context, instead of the store."""
    entries: list[DeferredGradient] = []
    if store is None:
        yield entries
        return
    before, earlier = store.defers, store.take()
    store.defers = defers
    try:
        yield entries
    finally:
        entries += store.take()
        store.defers = before
        for one in earlier:
            store.put(*one[:2], *one.tensors)


@contextmanager
def contributing(handles: Sequence[StepHandle]) -> Iterator[dict[StepHandle, Tensor]]:
    """Yield a dict that gets what step handles are given within the context, instead of the handles."""
    found: dict[StepHandle, Tensor] = {}
    before = {handle: handle.take_contribution() for handle in handles}
    try:
        yield found
    finally:
        for handle, earlier in before.items():
            if (value := handle.take_contribution()) is not None:
                found[handle] = value
            if earlier is not None:
                handle.add_contribution(earlier)


def store_sums(gradients: WeightGradients, computed: Iterable[tuple[int, Tensor | None]]) -> None:
    """Store deferred weight gradients by position, each once: a tied weight may have several."""
    sums: dict[int, Tensor] = {}
    for position, gradient in computed:
        assert gradient is not None, "a captured layer's own gradients are computed here"
        sums[position] = sums[position] + gradient if position in sums else gradient
    for position, gradient in sums.items():
        gradients.store(position, gradient)


def reached(roots: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[frozenset[int]]:
    """Return the positions of the leaves that each root's autograd graph reaches: the others get no gradient."""
    position = {id(leaf): at for at, leaf in enumerate(leaves)}
    found = []
    for root in roots:
        seen, left = set(), [root.grad_fn]
        while left:
            if (node := left.pop()) is not None and node not in seen:
                seen.add(node)
                left += [before for before, _ in node.next_functions]
        variables = (id(getattr(node, "variable", None)) for node in seen)
        found.append(frozenset(position[one] for one in variables if one in position))
    return found


class Times(NamedTuple):
    """Time of a layer's forward and backward, in seconds."""

    eager: float
    replayed: float


class LayerGraphs(Protocol):
    """Graphs of one layer and instance: forward, backward, and deferred weight gradients.

    Capturing is a first call of each, on any values.
    """

    contributions: Mapping[StepHandle, Tensor]
    """Contributions that the layer's step handles got in the last forward."""
    reaches: Sequence[frozenset[int]]
    """For each result with a gradient: which inputs with one, and then trained weights, get theirs from it."""

    def forward(self, inputs: Sequence[Static], outputs: Sequence[Static]) -> None:
        """Run the forward.

        Args:
            inputs: the input and the arguments.
            outputs: the output and the further results.
        """

    def backward(
        self, gradients: Sequence[Static | None], found: Sequence[Static | None], *, defers: bool
    ) -> Sequence[int]:
        """Run the backward, and store weight gradients; returns the positions of those trained weights.

        Args:
            gradients: gradients of the output and the further results; None for those that have none.
            found: gradients of the input and the arguments; None for those that have none.
            defers: leave weight gradients to `weights`.
        """

    def deferred(self) -> list[int]:
        """Return the positions of the trained weights whose gradients the backward has deferred, in its order."""

    def weights(self) -> None:
        """Compute and store the deferred weight gradients."""

    def finish(self) -> None:
        """End the micro-batch: nothing reads what it has left."""

    def times(self) -> Times | None:
        """Measure the layer, after capturing and between steps; None if its time says nothing about graphs."""


@dataclass(frozen=True)
class MakeGraphs:
    """A backend with the memory pools of a plan."""

    make: Callable[[CapturedLayer, Graph], LayerGraphs]
    """Makes the graphs of a layer and instance."""
    close: Callable[[], int]
    """Ends capturing, and returns the bytes of all pools."""


class LayerFailed(CaptureError):
    """A layer that can't be captured.

    Attributes:
        layer: its name.
        reason: why.
    """

    def __init__(self, layer: str, reason: str) -> None:
        super().__init__(
            f"{layer} can't be captured: {reason}",
            where="capture",
            rule="a graph runs on the device alone, on memory that stays where it is",
            fix="leave the layer eager",
        )
        self.layer, self.reason = layer, reason
