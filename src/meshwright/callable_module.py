"""Rooms that are verbs too: `meshwright.plan` is a package, and calling it is `meshwright.api.plan`."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any


class Verb(ModuleType):
    """A package that can be called; its `__init__` takes this for its class."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call the function of the package's name in `meshwright.api`, which stands above all rooms."""
        return getattr(import_module("meshwright.api"), self.__name__.rpartition(".")[2])(*args, **named)
