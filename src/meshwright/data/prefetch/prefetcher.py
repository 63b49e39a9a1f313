"""Values made ahead of their use, in a worker thread.

The values are pure functions of keys whose order is known beforehand, so the worker has no position to save or restore:
a resumed run starts another prefetcher at its first key.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Condition, Thread
from types import TracebackType
from typing import Generic, Self, TypeVar

from meshwright.log import get_logger

K = TypeVar("K")
V = TypeVar("V")

END_S = 10.0
"""How long leaving the context waits for a source in the middle of a read, which cannot be interrupted."""

_log = get_logger(__name__)


@dataclass(frozen=True)
class _Failure:
    """Exception of the worker."""

    error: BaseException


class Prefetcher(Generic[K, V]):
    """Worker thread that makes the values of keys in order, while its context is open.

    Args:
        keys: keys in the order in which their values are taken.
        make: makes a key's value; called by the worker only, one key at a time.
        ahead: number of values, at least 1, that may be made or in the making before they are taken. Together with the
            values that are in use it bounds the memory.
    """

    def __init__(self, keys: Iterable[K], make: Callable[[K], V], *, ahead: int) -> None:
        assert ahead >= 1, "nothing to make ahead"
        self._keys, self._make, self._ahead = keys, make, ahead
        self._made: deque[tuple[K, V] | _Failure] = deque()
        self._changed = Condition()
        self._closed = False
        self._thread = Thread(target=self._work, name="prefetch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._closed = True
            self._made.clear()
            self._changed.notify_all()
        self._thread.join(END_S)
        if self._thread.is_alive():
            _log.warning("the data source is still reading after %g s; its thread ends with the read", END_S)

    def take(self, key: K) -> V:
        """Wait for the value of the next key, which is `key`, and return it.

        Raises:
            BaseException: the exception that making it raised, with the worker's traceback; each further call raises
                it again, since the worker has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._made)
            item = self._made[0]
            if isinstance(item, _Failure):
                raise item.error
            made_key, value = item
            assert made_key == key, f"values are taken in the order of their keys: {key} instead of {made_key}"
            self._made.popleft()
            self._changed.notify_all()
        return value

    def _work(self) -> None:
        """Make one value after another until the keys or the context end, or a value fails."""
        values = ((key, self._make(key)) for key in self._keys)
        while self._has_room():
            item: tuple[K, V] | _Failure
            try:
                item = next(values, _Failure(AssertionError("all values were taken")))
            except BaseException as error:  # whatever it is, the thread that takes the value has to see it
                item = _Failure(error)
            with self._changed:
                if not self._closed:
                    self._made.append(item)
                self._changed.notify_all()
            if isinstance(item, _Failure):
                return
            del item  # the thread that takes the value frees it, however long the next one takes

    def _has_room(self) -> bool:
        """Wait until there is room for a value; return False once the context has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._made) < self._ahead)
            return not self._closed
