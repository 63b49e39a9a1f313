"""Interface of the objects that run operators in place of DTensor."""

from __future__ import annotations

from collections.abc import Callable
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

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call; within, DTensor runs operators by itself."""
