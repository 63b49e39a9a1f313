"""Values that a recomputed forward must not compute again: chosen experts, and rows received from other ranks.

Choosing again could change shapes after an update of a bias, and receiving again would repeat a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import Tensor

from meshwright.nn.step_handles import StepHandle

T = TypeVar("T", bound=tuple[Any, ...])


class ForwardCache(StepHandle):
    """Cache of values of one forward, to be returned again when the forward is recomputed.

    Without recomputation (`nn/recompute.py`) it computes every value and keeps none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.source: Iterator[tuple[Any, ...]] | None = None
        """Values of the forward that is being recomputed."""
        self.sinks: tuple[list[tuple[Any, ...]], ...] = ()
        """Where values of the current forward are kept: one list per recomputed module that it runs in."""

    def recall(self, compute: Callable[[], T]) -> T:
        """Return `compute()`, or in a recomputed forward the tuple that it returned in the first one.

        Recalled tensors are detached, and require gradients if they did, so that autograd saves what it saved before.
        """
        values: Any = compute() if self.source is None else tuple(_leaf(value) for value in next(self.source))
        for sink in self.sinks:
            sink.append(tuple(_leaf(value) for value in values))
        result: T = values
        return result

    def discard(self) -> None:
        """Do nothing: values live as long as the graph of their forward."""


class SavingForward(AbstractContextManager[None]):
    """Context of a forward whose cached values are kept."""

    def __init__(self, caches: list[ForwardCache]) -> None:
        self.values: dict[ForwardCache, list[tuple[Any, ...]]] = {cache: [] for cache in caches}
        self._before: list[tuple[list[tuple[Any, ...]], ...]] = []

    def __enter__(self) -> None:
        self._before = [cache.sinks for cache in self.values]
        for cache, kept in self.values.items():
            cache.sinks = (*cache.sinks, kept)  # of modules around this one, too: they are recomputed first

    def __exit__(self, *raised: object) -> None:
        for cache, before in zip(self.values, self._before, strict=True):
            cache.sinks = before


class RecallingForward(AbstractContextManager[None]):
    """Context of a recomputed forward, which recalls the values that `saved` kept."""

    def __init__(self, saved: SavingForward) -> None:
        self._saved = saved
        self._before: list[list[tuple[Any, Any]]] = []

    def __enter__(self) -> None:
        self._before.append([(cache.source, cache.sinks) for cache in self._saved.values])
        for cache, kept in self._saved.values.items():
            # No sinks: those of a forward under way, which another task interrupted, are not for these values.
            cache.source, cache.sinks = iter(kept), ()

    def __exit__(self, *raised: object) -> None:
        for cache, before in zip(self._saved.values, self._before.pop(), strict=True):
            cache.source, cache.sinks = before


def _leaf(value: Any) -> Any:
    # A tensor with its graph would keep the graph alive in a cycle that Python's collector can't see.
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
