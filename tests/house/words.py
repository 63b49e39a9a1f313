"""The field's own words: phrases that an engineer from torchtitan or Megatron would not say, and what to say instead.

Looked for in the whole text of the package's files and of the documentation: messages, help, docstrings and comments.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from tests.house.source import Tree

SAY = {
    r"whole cop(?:y|ies)": "replicated",
    r"\blies as\b": "is placed",
    r"parts? of (?:a|the) sum|partial numbers?": "partial",
    r"(?:is|are|was|be) put off": "deferred",
    r"added up": "reduced",
    r"handed on": "passed",
    r"\banew\b": "again",
    r"\bpictures?\b": "image for samples, figure for what we draw",
    r"\bbreach(?:es)?\b": "violation",
    r"\bmended\b": "corrected",
    r"waited in vain": "timed out",
    r"(?<!there )is no (?:file|folder|number|preset)\b": "file not found, not a …",
    r"whole numbers?\b": "int",
    r"\bcut (?:in|into|over|along|up)\b": "sharded",
    r"sends? [^\n]{0,30}(?:MiB|bytes|GiB) a step\b|\b(?:bytes|tokens) a step\b": "per step",
    r"\b1 (?:ranks|steps|processes|micro-batches|layers|files|keys)\b": "the singular, by units.counted",
}
"""Patterns, and the words in their place."""
RULES = [(re.compile(pattern, re.IGNORECASE), words) for pattern, words in SAY.items()]
PAGES = ("README.md", "CHANGELOG.md", "docs/*.md", "docs/examples/*.md")


def word_breaches(tree: Tree) -> list[str]:
    """Phrases to replace in the package and the documentation, with their places."""
    pages = {path.relative_to(tree.root).as_posix(): path.read_text("utf-8")
             for pattern in PAGES for path in sorted(tree.root.glob(pattern))}  # fmt: skip
    texts = {module.path: module.text for module in tree.package} | pages
    found = [f"{path}:{line} {what}" for path, text in texts.items() for line, what in _phrases(text)]
    return found + [f"{module.path}:{line} {what}" for module in tree.package for line, what in _plurals(module.nodes)]


def _phrases(text: str) -> Iterator[tuple[int, str]]:
    for pattern, words in RULES:
        for found in pattern.finditer(text):
            yield text.count("\n", 0, found.start()) + 1, f"says {found[0]!r}: say {words}"


PLURAL = re.compile(r" (?:[a-z/-]+ )?[a-z-]{2,}(?<![su])s\b(?<! has)(?<! its)(?<! times)")
LENGTH = re.compile(r"len\(.*\)(?: [+-] \w+)?")


def _plurals(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield lengths before a noun in the plural, which may be 1; `2 of 3 ranks` is fine."""
    for string in nodes:
        if not isinstance(string, ast.JoinedStr):
            continue
        parts = string.values
        for before, number, noun in zip([None, *parts], parts, parts[1:], strict=False):
            if not isinstance(number, ast.FormattedValue) or not isinstance(noun, ast.Constant):
                continue
            is_of = isinstance(before, ast.Constant) and str(before.value).endswith(" of ")
            if LENGTH.fullmatch(ast.unparse(number.value)) and (found := PLURAL.match(str(noun.value))) and not is_of:
                yield string.lineno, f"says '{{{ast.unparse(number.value)}}}{found[0]}': say it by units.counted"
