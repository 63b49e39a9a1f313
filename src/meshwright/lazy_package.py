"""Packages whose public names are imported when they are asked for, and packages that can be called."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any


class LazyPackage(ModuleType):
    """Module class of a package with public names from its modules, assigned in its `__init__`.

    The package's `_FILES` has the module, relative to it, of each public name that isn't imported at once.
    """

    _FILES: dict[str, str]

    def __getattr__(self, name: str) -> Any:
        if name in vars(self).get("_FILES", ()):
            return getattr(import_module(f"{self.__name__}.{self._FILES[name]}"), name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        # Importing a module binds it in its package, where a public name of the same name would be hidden by it.
        if not (isinstance(value, ModuleType) and name in vars(self).get("_FILES", ())):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *self.__all__})


class Verb(ModuleType):
    """Module class of a callable package: `meshwright.plan` is one, and calling it calls `meshwright.api.plan`."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call the function of the same name in `meshwright.api`."""
        return getattr(import_module("meshwright.api"), self.__name__.rpartition(".")[2])(*args, **named)
