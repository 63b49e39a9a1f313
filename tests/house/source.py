"""A source tree as the checkers see it: modules, their syntax trees, and what they import."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

PACKAGE = "meshwright"
PACKAGE_DIR = f"src/{PACKAGE}/"
BENCH = "meshwright_bench"
BENCH_DIR = f"bench/{BENCH}/"
"""The benchmarks: a package of its own, under the same rules, as one room above all others."""
IMPORTERS = ("importlib.import_module", "import_module", "__import__")


@dataclass(frozen=True)
class Import:
    """One imported thing, by its full dotted name (`meshwright.mesh.axes.Axes`, `torch.nn`)."""

    target: str
    line: int
    late: bool
    """Inside a function: runs when that is called."""
    typing_only: bool
    """Under `if TYPE_CHECKING`: never runs."""


@dataclass(frozen=True)
class Module:
    """One Python file; `path` is relative to the root of the repository."""

    path: str
    text: str = field(repr=False)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of the tree, as `ast.walk` finds it, in half the time."""
        found: list[ast.AST] = [self.tree]
        for node in found:  # which grows
            found += _children(node)
        return found

    @property
    def in_package(self) -> bool:
        return self.path.startswith((PACKAGE_DIR, BENCH_DIR))

    @property
    def inner_path(self) -> str:
        """The path inside the package: `mesh/axes.py`; of a benchmark `meshwright_bench/report.py`."""
        return self.path.removeprefix(PACKAGE_DIR).removeprefix("bench/")

    @property
    def room(self) -> str:
        """`mesh` for `mesh/axes.py`; the file's stem for a file beside the rooms."""
        return self.inner_path.split("/")[0].removesuffix(".py")

    @property
    def is_package(self) -> bool:
        return self.path.endswith("/__init__.py")

    @property
    def name(self) -> str:
        """`meshwright.mesh.axes`; a package's own name for its `__init__`."""
        parts = self.inner_path.removesuffix(".py").split("/")
        parts = parts if self.path.startswith(BENCH_DIR) else [PACKAGE, *parts]
        return ".".join(parts[:-1] if self.is_package else parts)

    @cached_property
    def docstring(self) -> str:
        """With line breaks as spaces."""
        return " ".join((ast.get_docstring(self.tree) or "").split())

    @cached_property
    def imports(self) -> list[Import]:
        return list(self._walk(self.tree, late=False, typing_only=False))

    @cached_property
    def aliases(self) -> dict[str, str]:
        """What each imported local name stands for: `dist` → `torch.distributed`. One scope for the file."""
        names: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    root = alias.name.split(".")[0]
                    names[alias.asname or root] = alias.name if alias.asname else root
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    names[alias.asname or alias.name] = f"{self._base(node)}.{alias.name}"
        return names

    def full_name(self, node: ast.expr) -> str | None:
        """The dotted name that an expression such as `dist.all_reduce` stands for; None if not imported."""
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.aliases:
            return None
        return ".".join([self.aliases[node.id], *reversed(attributes)])

    @cached_property
    def _imports_by_name(self) -> bool:
        """Whether expressions may import; otherwise only statements do."""
        return any(name in self.text for name in IMPORTERS)

    def _walk(self, node: ast.AST, *, late: bool, typing_only: bool) -> Iterator[Import]:
        for target in self._targets(node) if isinstance(node, ast.Import | ast.ImportFrom | ast.Call) else ():
            yield Import(target, getattr(node, "lineno", 0), late, typing_only)
        late = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in _children(node):
            if isinstance(child, ast.expr) and not self._imports_by_name:
                continue
            hidden = isinstance(node, ast.If) and _asks_type_checking(node.test) and child in node.body
            yield from self._walk(child, late=late, typing_only=typing_only or hidden)

    def _targets(self, node: ast.AST) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            return [f"{self._base(node)}.{alias.name}" for alias in node.names]
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and ast.unparse(node.func) in IMPORTERS:
                return [str(node.args[0].value)]
        return []

    def _base(self, node: ast.ImportFrom) -> str:
        """The module that a `from` import takes names of, with leading dots resolved."""
        if not node.level:
            return node.module or ""
        package = self.name.split(".") if self.is_package else self.name.split(".")[:-1]
        package = package[: len(package) - node.level + 1]
        return ".".join([*package, *([node.module] if node.module else [])])


@dataclass(frozen=True)
class Tree:
    """A repository: the modules of `src/`, `bench/` and `tests/`."""

    root: Path
    modules: tuple[Module, ...]

    @staticmethod
    def read(root: Path) -> Tree:
        paths = sorted(path for top in ("src", "bench", "tests") for path in (root / top).rglob("*.py"))
        return Tree(root, tuple(Module(p.relative_to(root).as_posix(), p.read_text("utf-8")) for p in paths))

    @property
    def package(self) -> list[Module]:
        """The modules of the package itself and of the benchmarks."""
        return [module for module in self.modules if module.in_package]

    @cached_property
    def by_name(self) -> dict[str, Module]:
        return {module.name: module for module in self.package}

    def resolve(self, target: str) -> list[Module]:
        """The package's modules that importing `target` runs: the module it is or is in, and its parents."""
        parts = target.split(".")
        prefixes = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
        return [self.by_name[prefix] for prefix in prefixes if prefix in self.by_name]


def _children(node: ast.AST) -> list[ast.AST]:
    """Yield what `ast.iter_child_nodes` does, in half the time."""
    found: list[ast.AST] = []
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, ast.AST):
            found.append(value)
        elif isinstance(value, list):
            found += [one for one in value if isinstance(one, ast.AST)]
    return found


def is_builtin_call(node: ast.AST, name: str) -> bool:
    """Whether `node` calls the builtin `name` directly."""
    assert hasattr(builtins, name)
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def _asks_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
