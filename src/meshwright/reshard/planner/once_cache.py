"""A bounded cache of values that are costly to compute: each is computed once, however many threads ask.

What is kept are values alone (plans, errors never), the least recently used dropped first.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class _Pending(Generic[V]):
    """A computation that others may wait for."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.done = threading.Event()
        self.values: list[V] = []


class OnceCache(Generic[V]):
    """Values by key, at most `capacity` of them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._reset()
        # A child has the threads' unfinished computations, and perhaps the lock, but not the threads.
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, V] = OrderedDict()
        self._pending: dict[Hashable, _Pending[V]] = {}

    def get(self, key: Hashable, compute: Callable[[], V]) -> V:
        """The value of `key`; `compute` runs, outside the lock, only if no thread has computed it or is about to.

        If it raises, its thread gets the error, and of those that waited one tries next.
        """
        while True:
            with self._lock:
                if key in self._values:
                    self._values.move_to_end(key)
                    return self._values[key]
                pending = self._pending.get(key)
                if pending is None:
                    mine = self._pending[key] = _Pending[V]()
                    break
            if pending.thread == threading.get_ident():
                return compute()  # asked for by its own computation: waiting would never end
            pending.done.wait()
            if pending.values:
                return pending.values[0]
        try:
            value = compute()
            mine.values.append(value)
        finally:
            with self._lock:
                self._pending.pop(key, None)
                if mine.values:
                    self._values[key] = value
                    if len(self._values) > self._capacity:
                        self._values.popitem(last=False)
            mine.done.set()
        return value

    def clear(self) -> None:
        """Forget all values. Computations under way go on, and their values are kept."""
        with self._lock:
            self._values.clear()

    def __len__(self) -> int:
        return len(self._values)
