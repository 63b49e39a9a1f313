"""Callable packages: `meshwright.plan` is a package, and calling it calls `meshwright.api.plan`."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any


class Verb(ModuleType):
    """Module class of a callable package, assigned in the package's `__init__`."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call the function of the same name in `meshwright.api`."""
        return getattr(import_module("meshwright.api"), self.__name__.rpartition(".")[2])(*args, **named)
