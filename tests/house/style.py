"""Style that the linter doesn't know: lengths, `global`, `print`, docstrings, open ends."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from tests.house.source import Module, Tree, is_builtin_call

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_TEST_LINES = 80

LONG_FILES: tuple[str, ...] = ()
"""Tables of data that may be longer, by path."""

PRINTING = ("cli/", "meshwright_bench/command.py", "meshwright_bench/gpu/command.py")
"""Starts of the paths, inside the package, of files that may print."""

OPEN_END = re.compile(r"\b(TODO|FIXME|XXX)\b")
REFERENCE = re.compile(r"#\d+|https?://")


def style_breaches(tree: Tree) -> list[str]:
    """Breaches of the style rules in the package and, but for `print` and docstrings, in the tests."""
    breaches = []
    for module in tree.modules:
        found = [*_lengths(module), *_globals(module), *_open_ends(module)]
        if module.in_package:
            found += [*_prints(module), *_docstring(module)]
        breaches += [f"{module.path}:{line} {what}" for line, what in found]
    return breaches


Found = Iterator[tuple[int, str]]


def _lengths(module: Module) -> Found:
    num_lines = module.text.count("\n")
    if num_lines > MAX_FILE_LINES and module.path not in LONG_FILES:
        yield num_lines, f"is {num_lines} lines long, more than {MAX_FILE_LINES}"
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            most = MAX_FUNCTION_LINES if module.in_package else MAX_TEST_LINES
            if num_lines > most:
                yield node.lineno, f"{node.name} is {num_lines} lines long, more than {most}"


def _globals(module: Module) -> Found:
    for node in module.nodes:
        if isinstance(node, ast.Global):
            yield node.lineno, f"has `global {', '.join(node.names)}`: pass state as arguments"


def _prints(module: Module) -> Found:
    for node in module.nodes:
        if is_builtin_call(node, "print") and not module.inner_path.startswith(PRINTING):
            yield getattr(node, "lineno", 0), "calls print: use logging outside cli"


def _docstring(module: Module) -> Found:
    stem = module.path.rpartition("/")[2].removesuffix(".py")
    if (not stem.startswith("_") or stem == "__init__") and not module.docstring:
        yield 1, "has no module docstring"


def _open_ends(module: Module) -> Found:
    if not OPEN_END.search(module.text):
        return
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        comment = token.type == tokenize.COMMENT
        if comment and OPEN_END.search(token.string) and not REFERENCE.search(token.string):
            yield token.start[0], "leaves an open end without a reference (an issue's #number or address)"
