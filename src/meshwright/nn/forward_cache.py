"""Values that a recomputed forward must not compute again: chosen experts, and rows received from other ranks.

Choosing again could change shapes after an update of a bias, and receiving again would repeat a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

from torch import Tensor

from meshwright.nn.kept_results import KeptResults
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

        self.kept: tuple[KeptResults, ...] = ()
        """Kept results of the selectively recomputed modules that the current forward runs in."""

    @contextmanager
    def skipped(self) -> Iterator[None]:
        """Context of work that a recomputed forward skips, because it recalls what comes of it.

        Selective recomputation then keeps no results of it. `recall` is such a context itself.
        """
        with ExitStack() as stack:
            for kept in self.kept:
                stack.enter_context(kept.paused())
            yield

    def recall(self, compute: Callable[[], T]) -> T:
        """Return `compute()`, or in a recomputed forward the tuple that it returned in the first one.

        Recalled tensors are detached, and require gradients if they did, so that autograd saves what it saved before.
        """
        values: Any
        if self.source is None:
            with self.skipped():
                values = compute()
        else:
            values = tuple(_leaf(value) for value in next(self.source))
        for sink in self.sinks:
            sink.append(tuple(_leaf(value) for value in values))
        result: T = values
        return result

    def discard(self) -> None:
        """Do nothing: values live as long as the graph of their forward."""


class SavingForward(AbstractContextManager[None]):
    """Context of a forward whose cached values are kept, and other results in `kept` if it is given."""

    def __init__(self, caches: list[ForwardCache], kept: KeptResults | None = None) -> None:
        self.values: dict[ForwardCache, list[tuple[Any, ...]]] = {cache: [] for cache in caches}
        self._kept = () if kept is None else (kept,)
        self._before: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        self._before = [(cache.sinks, cache.kept) for cache in self.values]
        for cache, values in self.values.items():
            cache.sinks = (*cache.sinks, values)  # of modules around this one, too: they are recomputed first
            cache.kept = (*cache.kept, *self._kept)

    def __exit__(self, *raised: object) -> None:
        for cache, before in zip(self.values, self._before, strict=True):
            cache.sinks, cache.kept = before


class RecallingForward(AbstractContextManager[None]):
    """Context of a recomputed forward, which recalls the values that `saved` kept."""

    def __init__(self, saved: SavingForward) -> None:
        self._saved = saved
        self._before: list[list[tuple[Any, Any, Any]]] = []

    def __enter__(self) -> None:
        self._before.append([(cache.source, cache.sinks, cache.kept) for cache in self._saved.values])
        for cache, values in self._saved.values.items():
            # No sinks: those of a forward under way, which another task interrupted, are not for these values.
            cache.source, cache.sinks, cache.kept = iter(values), (), ()

    def __exit__(self, *raised: object) -> None:
        for cache, before in zip(self._saved.values, self._before.pop(), strict=True):
            cache.source, cache.sinks, cache.kept = before


def _leaf(value: Any) -> Any:
    # A tensor with its graph would keep the graph alive in a cycle that Python's collector can't see.
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
