"""Small changes of source code: an operator, a constant, a condition or a statement. Imports nothing but Python's own.

Each is made on the syntax tree, and named by the place of its node, so that it can be made again in another process,
which imports the changed module.
"""

from __future__ import annotations

import ast
import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

PAIRS = ((ast.Add, ast.Sub), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot),
         (ast.In, ast.NotIn), (ast.And, ast.Or))  # fmt: skip
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.MatMult: ast.Mult,
    **dict(PAIRS), **{right: left for left, right in PAIRS},
}  # fmt: skip
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True)
class Mutant:
    """One change of one module."""

    module: str
    """Name of the module, such as `meshwright.train.train_step`."""
    line: int
    number: int
    """Which of the module's changes, in the order of `changes`."""
    before: str
    """Source of the changed piece."""
    after: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.before}  →  {self.after}"


def changes(tree: ast.Module) -> Iterator[tuple[ast.AST, Callable[[ast.AST], ast.AST]]]:
    """Yield the nodes inside functions that can be changed, each with a function that returns the changed node.

    Annotations, decorators, docstrings, default values and what is raised or asserted stay.
    """
    for node in ast.iter_child_nodes(tree):
        yield from _inside(node, is_run=False)


def _inside(node: ast.AST, *, is_run: bool) -> Iterator[tuple[ast.AST, Callable[[ast.AST], ast.AST]]]:
    if isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr):
        return
    if is_run:
        yield from ((node, change) for change in _changes_of(node))
    if isinstance(node, FUNCTIONS):
        body = node.body if isinstance(node.body, list) else [node.body]
        for child in body:
            yield from _inside(child, is_run=True)
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "decorator_list", "returns", "bases", "keywords" if not is_run else ""):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _inside(child, is_run=is_run)


def _changes_of(node: ast.AST) -> Iterator[Callable[[ast.AST], ast.AST]]:
    match node:
        case ast.BinOp() | ast.AugAssign() | ast.BoolOp() if type(node.op) in SWAPS:
            yield _with_operator
        case ast.Compare(ops=[op]) if type(op) in SWAPS:
            yield _with_comparison
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield lambda found: found.operand  # type: ignore[attr-defined]
        case ast.Constant(value=bool()):
            yield lambda found: ast.Constant(not found.value)  # type: ignore[attr-defined]
        case ast.Constant(value=int()):
            yield lambda found: ast.Constant(found.value + 1)  # type: ignore[attr-defined]
        case ast.Constant(value=float()):
            yield lambda found: ast.Constant(2 * found.value + 1)  # type: ignore[attr-defined]
        case ast.Expr(value=ast.Call()):
            yield lambda found: ast.Pass()
        case ast.IfExp():
            yield lambda found: found.body  # type: ignore[attr-defined]
            yield lambda found: found.orelse  # type: ignore[attr-defined]
        case ast.If():
            yield _never
    if isinstance(node, ast.AugAssign):
        yield lambda found: ast.Pass()
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript):
        yield lambda found: ast.Pass()


def _with_operator(found: ast.AST) -> ast.AST:
    new = copy.deepcopy(found)
    new.op = SWAPS[type(found.op)]()  # type: ignore[attr-defined]
    return new


def _with_comparison(found: ast.AST) -> ast.AST:
    new = copy.deepcopy(found)
    new.ops = [SWAPS[type(found.ops[0])]()]  # type: ignore[attr-defined]
    return new


def _never(found: ast.AST) -> ast.AST:
    new = copy.deepcopy(found)
    new.test = ast.Constant(False)  # type: ignore[attr-defined]
    return new


def mutants_of(module: str, path: Path, lines: set[int]) -> list[Mutant]:
    """Return the mutants of a module, whose source is in `path`, on lines that were run."""
    found = []
    for number, (node, change) in enumerate(changes(ast.parse(path.read_text("utf-8")))):
        line: int = node.lineno  # type: ignore[attr-defined]
        if line in lines:
            found.append(Mutant(module, line, number, _source(node), _source(change(node))))
    return found


def _source(node: ast.AST) -> str:
    text = " ".join(ast.unparse(ast.fix_missing_locations(node)).split())
    return text if len(text) <= 90 else f"{text[:87]}..."


def mutated(mutant: Mutant, path: Path) -> ast.Module:
    """Return the syntax tree of the mutant's module, changed."""
    tree = ast.parse(path.read_text("utf-8"))
    node, change = list(changes(tree))[mutant.number]
    return ast.fix_missing_locations(_Replace(node, change(node)).visit(tree))


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, ast.copy_location(new, old)

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if node is self._old else self.generic_visit(node)


def mutate_import(mutant: Mutant) -> None:
    """Have the mutant's module imported with its change.

    Raises:
        RuntimeError: the module is already imported.
    """
    if mutant.module in sys.modules:
        raise RuntimeError(f"{mutant.module} is already imported")
    sys.meta_path.insert(0, _Finder(mutant))


class _Finder(MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._mutant.module:
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.origin is not None
        spec.loader = _Loader(self._mutant, name, spec.origin)
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, mutant: Mutant, name: str, path: str) -> None:
        super().__init__(name, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        return compile(mutated(self._mutant, Path(self.path)), self.path, "exec")
