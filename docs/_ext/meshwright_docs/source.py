"""Syntax trees of the package: modules, name resolution and public names."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

Definition = ast.ClassDef | ast.FunctionDef | ast.Assign | ast.AnnAssign


def is_public(name: str) -> bool:
    """Return True if no component of a dotted name is private; modules `private` adapt private names of PyTorch."""
    return not any(part.startswith("_") or part == "private" for part in name.split("."))


@dataclass(frozen=True)
class Module:
    """A source file of the package."""

    name: str
    is_package: bool
    tree: ast.Module

    @cached_property
    def body(self) -> list[ast.stmt]:
        """Top-level statements, including those under `if` and `try`."""
        return list(_flat(self.tree.body))

    @cached_property
    def definitions(self) -> dict[str, Definition]:
        """Classes, functions and variables by name; the first of several assignments."""
        found: dict[str, Definition] = {}
        for node in self.body:
            for name in _defined(node):
                if isinstance(node, Definition):
                    found.setdefault(name, node)
        return found

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Full names of imports."""
        names: dict[str, str] = {}
        for node in self.body:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    names[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    names[alias.asname or alias.name] = f"{self._base(node)}.{alias.name}"
        return names

    @cached_property
    def lazy(self) -> dict[str, str]:
        """Names that `__getattr__` resolves, with their files from the module's table."""
        asked = self.definitions.get("__getattr__")
        if not isinstance(asked, ast.FunctionDef):
            return {}
        found: dict[str, str] = {}
        for node in ast.walk(asked):
            if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], ast.In):
                continue
            if isinstance(node.comparators[0], ast.Name):
                table = self.constant(node.comparators[0].id)
                found |= table if isinstance(table, dict) else dict.fromkeys(table, "")
        return found

    @cached_property
    def exports(self) -> tuple[str, ...]:
        """Names in `__all__` and those that `__getattr__` resolves."""
        listed = self.constant("__all__") if "__all__" in self.definitions else ()
        return tuple(dict.fromkeys([*listed, *self.lazy]))

    def constant(self, name: str) -> dict[str, str] | tuple[str, ...]:
        """Return the literal value of a variable."""
        node = self.definitions[name]
        assert isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        value = ast.literal_eval(node.value)
        return value if isinstance(value, dict) else tuple(value)

    def comment(self, name: str) -> str:
        """Return the docstring below the assignment to `name`."""
        return comment_below(self.body, self.definitions[name])

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        parts = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])


@dataclass(frozen=True)
class Source:
    """All modules of the package by name."""

    package: str
    modules: Mapping[str, Module]

    @staticmethod
    def read(folder: Path) -> Source:
        """Parse every file under the package's folder."""
        modules = {}
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            modules[name] = Module(name, is_package, ast.parse(path.read_text("utf-8"), path.name))
        return Source(folder.name, modules)

    def within(self, package: str) -> list[Module]:
        """Return the public modules of a package at any depth, without the package itself."""
        return [one for name, one in self.modules.items() if name.startswith(f"{package}.") and is_public(name)]

    def resolve(self, module: Module, name: str) -> str | None:
        """Return the full name of the definition of a dotted name in a module, or None if unknown."""
        first, _, rest = name.partition(".")
        if first in module.definitions:
            return f"{module.name}.{name}"
        if first in module.aliases:
            target = module.aliases[first]
            if target == f"{module.name}.{first}":  # `from package import submodule` in its own `__init__`
                return self.find(f"{target}.{rest}") if rest else target
        elif module.lazy.get(first):
            target = f"{module.name}.{module.lazy[first]}.{first}"
        elif f"{module.name}.{first}" in self.modules:
            target = f"{module.name}.{first}"
        elif first == self.package:
            target = first
        else:
            return None
        return self.find(f"{target}.{rest}" if rest else target)

    def find(self, full: str) -> str:
        """Return the full name of the definition of an imported name; foreign names are returned unchanged."""
        parts = full.split(".")
        for length in range(len(parts) - 1, 0, -1):
            module = self.modules.get(".".join(parts[:length]))
            if module is not None:
                rest = ".".join(parts[length:])
                if parts[length] in module.definitions:
                    return f"{module.name}.{rest}"
                if full in self.modules and module.aliases.get(parts[length], full) == full:
                    return full
                return self.resolve(module, rest) or full
        return full

    def definition(self, full: str) -> tuple[Module, str, Definition] | None:
        """Return module, name and syntax tree of a top-level definition, or None."""
        module = self.modules.get(full.rpartition(".")[0])
        name = full.rpartition(".")[2]
        if module is None or name not in module.definitions:
            return None
        return module, name, module.definitions[name]


def comment_below(body: list[ast.stmt], node: ast.stmt) -> str:
    """Return the string after a statement, which documents it; empty if there is none."""
    position = body.index(node)
    below = body[position + 1] if position + 1 < len(body) else None
    if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
        return below.value.value
    return ""


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _flat([*node.body, *node.orelse])


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.AnnAssign):
        return [node.target.id] if isinstance(node.target, ast.Name) else []
    if isinstance(node, ast.Assign):
        names = []
        for target in node.targets:
            elements = target.elts if isinstance(target, ast.Tuple) else [target]
            names += [one.id for one in elements if isinstance(one, ast.Name)]
        return names
    return []
