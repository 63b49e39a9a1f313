"""Interface of the objects that run operators in place of DTensor, and the parts of it that touch no private name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Function of an operator and its arguments that runs the operator in place of DTensor's planner."""
HandlerTable = dict[Any, Handler]
"""Handlers by operator."""


class Interceptor(Protocol):
    """Context that runs some operators in place of DTensor."""

    replicates_plain_tensors: bool
    """True if plain tensors mixed with DTensors reach `run`, instead of an error by DTensor."""

    def handlers(self, own: HandlerTable) -> HandlerTable:
        """Return DTensor's own table of handlers with those of the operators to run always."""

    def recovers(self, error: Exception) -> bool:
        """Return True to run a call that DTensor failed to plan."""

    def note_tracing(self) -> None:
        """Note that DTensor plans operators for `torch.compile`, which no context changes."""

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call; within, DTensor runs operators by itself."""


class DispatchState(threading.local):
    """State of one thread.

    Attributes:
        handlers: the table that DTensor's dispatcher looks up on this thread; None if it is to be found from the
            redistribution hook, as on a thread that only runs backward.
        num_running: number of interceptors that are running.
        has_clean_cache: True if all plans cached by this thread are from after the first context.
    """

    handlers: HandlerTable | None = None
    num_running = 0
    has_clean_cache = False


class Patches:
    """Reference-counted replacement of attributes, shared by all threads.

    Args:
        make: function that returns the owners, names and replacements, called when the first user acquires them.
    """

    def __init__(self, make: Callable[[], Iterable[tuple[Any, str, Any]]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._num_users = 0
        self._originals: list[tuple[Any, str, Any]] = []

    def original(self, owner: Any, name: str) -> Any:
        """Return what was replaced, while there are users."""
        return next(value for o, n, value in self._originals if o is owner and n == name)

    def acquire(self) -> None:
        with self._lock:
            self._num_users += 1
            if self._num_users == 1:
                for owner, name, value in self._make():
                    self._originals.append((owner, name, vars(owner).get(name)))
                    setattr(owner, name, value)

    def release(self) -> None:
        with self._lock:
            self._num_users -= 1
            while self._num_users == 0 and self._originals:
                owner, name, value = self._originals.pop()
                delattr(owner, name) if value is None else setattr(owner, name, value)
