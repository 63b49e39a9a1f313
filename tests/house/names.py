"""Names of torch that only some files may use: collectives, and private names."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from tests.house.source import Module, Tree

COLLECTIVE_ROOMS = ("comm",)
"""The rooms that move bytes between ranks."""

COLLECTIVE = re.compile(
    r"(all_reduce|all_gather|reduce_scatter|broadcast|all_to_all|gather|scatter|send|recv|isend|irecv)(_\w+)?"
    r"|reduce|barrier|monitored_barrier|batch_isend_irecv|P2POp"
)

PRIVATE_WORDS = re.compile(r"Private (PyTorch|transformers) names", re.IGNORECASE)
"""What the docstring of a room's one adapter to a library's private names says."""

OTHERS = ("aten", "os")
"""Whose names with an underscore are not private: `aten._to_copy` is an operator, `os._exit` documented."""


def collective_breaches(tree: Tree) -> list[str]:
    """Collectives of `torch.distributed` used outside the rooms for it."""
    breaches = []
    for module in tree.package:
        if module.room in COLLECTIVE_ROOMS:
            continue
        for line, name in _torch_names(module):
            if name.startswith("torch.distributed.") and COLLECTIVE.fullmatch(name.rpartition(".")[2]):
                breaches.append(f"{module.path}:{line} uses {name}; only {', '.join(COLLECTIVE_ROOMS)} may")
    return breaches


OF_NAMED_TUPLES = {"_replace", "_asdict", "_make", "_fields"}
"""Public names of `typing.NamedTuple`: the underscore keeps them apart from fields."""


def private_breaches(tree: Tree) -> list[str]:
    """Private names of torch outside an adapter, and second adapters of a room to one library."""
    breaches = []
    adapters: dict[tuple[str, str], list[str]] = defaultdict(list)
    ours = set().union(*map(_defined, tree.package))
    for module in tree.package:
        if words := PRIVATE_WORDS.search(module.docstring):
            adapters[module.room, words[1]].append(module.path)
            continue
        uses = [(line, name) for line, name in _torch_names(module) if _is_private(name)]
        uses += _foreign_attributes(module, ours)
        breaches += [
            f"{module.path}:{line} uses {name}, but its docstring has no section 'Private PyTorch names'"
            for line, name in uses
        ]
    for (room, _), paths in adapters.items():
        if len(paths) > 1:
            breaches.append(f"{room} has {len(paths)} adapters to private names: {', '.join(paths)}")
    adapter_paths = {path for paths in adapters.values() for path in paths}
    for module in tree.package:
        for one in module.imports:
            for imported in tree.resolve(one.target)[-1:]:
                if imported.path in adapter_paths and imported.room != module.room:
                    breaches.append(f"{module.path}:{one.line} imports the adapter of another room, {imported.path}")
    return breaches


def _foreign_attributes(module: Module, ours: set[str]) -> Iterator[tuple[int, str]]:
    """Attributes with an underscore that nothing here defines: they are another library's.

    On `self` and `cls` they may be inherited from another file of the package; on any other object, what this file
    defines is meant, since an attribute private to a file is no other file's to use.
    """
    defined = _defined(module)
    for node in module.nodes:
        if not isinstance(node, ast.Attribute) or not _is_private(node.attr) or node.attr in OF_NAMED_TUPLES:
            continue
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        if owner not in OTHERS and node.attr not in (ours if owner in ("self", "cls") else defined):
            yield node.lineno, f".{node.attr}"


def _defined(module: Module) -> set[str]:
    """Names with an underscore that a file gives to something: functions, classes, fields, attributes of `self`."""
    found = set()
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return {name for name in found if _is_private(name)}


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _torch_names(module: Module) -> Iterator[tuple[int, str]]:
    """Full dotted names of torch in imports and in expressions, each with its line."""
    for one in module.imports:
        if _of_torch(one.target):
            yield one.line, one.target
    for node in module.nodes:
        if isinstance(node, ast.Attribute):
            name = module.full_name(node)
            if name is not None and _of_torch(name):
                yield node.lineno, name


def _of_torch(name: str) -> bool:
    return name.split(".")[0] == "torch"
