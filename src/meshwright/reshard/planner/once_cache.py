"""Bounded LRU cache that computes each value once, even if several threads request it at the same time.

Errors are not cached.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class _Pending(Generic[V]):
    """Computation in progress that other threads may wait for."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.done = threading.Event()
        self.values: list[V] = []


class OnceCache(Generic[V]):
    """LRU cache of at most `capacity` values."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._reset()
        # A forked child inherits pending computations, and perhaps a held lock, but not the threads behind them.
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, V] = OrderedDict()
        self._pending: dict[Hashable, _Pending[V]] = {}

    def get(self, key: Hashable, compute: Callable[[], V]) -> V:
        """Return the value of `key`. Call `compute`, outside the lock, unless the value is cached or being computed.

        If `compute` raises, its own thread gets the error, and one of the waiting threads tries again.
        """
        while True:
            with self._lock:
                if key in self._values:
                    self._values.move_to_end(key)
                    return self._values[key]
                pending = self._pending.get(key)
                if pending is None:
                    own_pending = self._pending[key] = _Pending[V]()
                    break
            if pending.thread == threading.get_ident():
                return compute()  # reentrant call from the computation itself: waiting would deadlock
            pending.done.wait()
            if pending.values:
                return pending.values[0]
        try:
            value = compute()
            own_pending.values.append(value)
        finally:
            with self._lock:
                self._pending.pop(key, None)
                if own_pending.values:
                    self._values[key] = value
                    if len(self._values) > self._capacity:
                        self._values.popitem(last=False)
            own_pending.done.set()
        return value

    def clear(self) -> None:
        """Drop all values. Computations in progress continue and are cached when done."""
        with self._lock:
            self._values.clear()

    def __len__(self) -> int:
        return len(self._values)
