"""`docs/where.md`: every row names a file and a symbol that exist, and every room has a row."""

from __future__ import annotations

import ast
import re

from tests.house.source import PACKAGE_DIR, Module, Tree

WHERE = "docs/where.md"


def where_breaches(tree: Tree) -> list[str]:
    """Rows that point at nothing, and rooms without a row."""
    file = tree.root / WHERE
    if not file.exists():
        return [f"{WHERE} is missing"]
    breaches: list[str] = []
    rooms: set[str] = set()
    for number, line in enumerate(file.read_text("utf-8").splitlines(), start=1):
        if not line.startswith("|") or _is_heading(line):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        path = re.fullmatch(r"`([^`]+)`", cells[1]) if len(cells) == 3 else None
        if path is None:
            breaches.append(f"{WHERE}:{number} is not a row | question | `path` | `symbol` |")
            continue
        rooms.add(path[1].removeprefix(PACKAGE_DIR).removeprefix("bench/").split("/")[0])
        breaches += [f"{WHERE}:{number} {what}" for what in _missing(tree, path[1], cells[2])]
    expected = {m.room for m in tree.package if "/" in m.inner_path and not m.is_package}
    breaches += [f"{WHERE} has no row for the room {room}" for room in sorted(expected - rooms)]
    return breaches


def _is_heading(line: str) -> bool:
    return not line.strip("|-: ") or line.replace(" ", "").startswith("|question|")


def _missing(tree: Tree, path: str, symbol_cell: str) -> list[str]:
    if not (tree.root / path).is_file():
        return [f"names {path}, which does not exist"]
    symbols = re.findall(r"`([^`]+)`", symbol_cell)
    module = next((module for module in tree.modules if module.path == path), None)
    if module is None:  # not Python: a data file has no symbols
        return [f"names symbols of {path}, which is not Python"] if symbols else []
    if not symbols:
        return [f"names no symbol of {path}"]
    return [f"names {one}, which {path} does not define" for one in symbols if not _defines(module, one)]


def _defines(module: Module, symbol: str) -> bool:
    body: list[ast.stmt] = module.tree.body
    *owners, name = symbol.removesuffix("()").split(".")
    for owner in owners:
        found = next((node for node in body if isinstance(node, ast.ClassDef) and node.name == owner), None)
        if found is None:
            return False
        body = found.body
    return any(name in _names_of(node) for node in body)


def _names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []
