"""Figures of the tree that a reader feels: how long functions are, how full rooms, and whether imports go in circles.

`python -m tests.house.figures` prints them.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from statistics import median

from tests.house.floors import is_for_types
from tests.house.source import PACKAGE_DIR, Tree

MAX_MEDIAN_LINES = 8
"""Median lines of functions and methods, docstrings included."""
MAX_FILES = 24
"""Python files side by side in a folder."""


def figure_breaches(tree: Tree) -> list[str]:
    """Functions too long on the whole, folders too full, import cycles."""
    breaches = []
    if (middle := median(_lengths(tree))) > MAX_MEDIAN_LINES:
        breaches.append(f"half of all functions have over {middle:g} lines; the median may be {MAX_MEDIAN_LINES}")
    for folder, count in _files_by_folder(tree).items():
        if count > MAX_FILES:
            breaches.append(f"{folder} has {count} files side by side, more than {MAX_FILES}: give it subfolders")
    breaches += [f"import cycle: {' → '.join([*cycle, cycle[0]])}" for cycle in import_cycles(tree)]
    return breaches


def import_cycles(tree: Tree) -> list[list[str]]:
    """Files that import one another in a circle, also inside functions and for types: strongly connected ones.

    Tarjan 1972, "Depth-first search and linear graph algorithms".
    """
    graph = {module.name: _imported(tree, module.name) for module in tree.package}
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for target in sorted(graph[name]):
            if target not in order:
                visit(target)
                lowest[name] = min(lowest[name], lowest[target])
            elif target in stack:
                lowest[name] = min(lowest[name], order[target])
        if lowest[name] == order[name]:
            found = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(found) > 1:
                cycles.append(found)

    for name in sorted(graph):
        if name not in order:
            visit(name)
    return cycles


def _imported(tree: Tree, name: str) -> set[str]:
    """The files that a file names in imports; a package's `__init__` where a name is the package's own."""
    found = set()
    module = tree.by_name[name]
    for one in module.imports:
        if one.typing_only and is_for_types(module):
            continue
        modules = tree.resolve(one.target)
        if modules and modules[-1].name != name:
            found.add(modules[-1].name)
    return found


def _lengths(tree: Tree) -> list[int]:
    return [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for module in tree.package
        for node in module.nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ] or [0]


def _files_by_folder(tree: Tree) -> Counter[str]:
    return Counter(str(Path(module.path).parent) for module in tree.package)


def main() -> None:
    """Print the figures of this repository."""
    tree = Tree.read(Path(__file__).parents[2])
    lengths, files = _lengths(tree), [module.text.count("\n") for module in tree.package]
    folder, most = _files_by_folder(tree).most_common(1)[0]
    source = sum(module.text.count("\n") for module in tree.package if module.path.startswith(PACKAGE_DIR))
    print(f"functions        {len(lengths)}: median {median(lengths):g} lines, longest {max(lengths)}")
    print(f"files            {len(files)}: longest {max(files)} lines")
    print(f"fullest folder   {folder}: {most} files")
    print(f"import cycles    {len(import_cycles(tree))}")
    print(f"lines of src/    {source}")


if __name__ == "__main__":
    main()
