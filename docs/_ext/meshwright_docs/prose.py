"""Conversion of docstrings to Markdown for MyST: sections such as `Args:`, and links."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

SECTIONS = {
    "Args": "Parameters",
    "Attributes": "Attributes",
    "Raises": "Raises",
    "Returns": "Returns",
    "Yields": "Yields",
}
"""Section headings in docstrings and on the pages."""

HEADING = re.compile(rf"({'|'.join(SECTIONS)}):")
ITEM = re.compile(r"(?P<names>\*{0,2}\w[\w.]*(?:, \*{0,2}\w[\w.]*)*): (?P<text>.*)")
FENCE = re.compile(r"^ *(```+)")
CODE = re.compile(r"(?<![`}\[])`([^`\n]+)`(?!`)")
NAME = re.compile(r"[A-Za-z_][\w.]*")

Link = Callable[[str], str | None]
"""Function from a name in a docstring to the documented name; None if it is not documented."""


def as_markdown(docstring: str, link: Link) -> str:
    """Convert a docstring to Markdown, with sections as lists and names as links."""
    lines: list[str] = []
    rest = inspect.cleandoc(docstring).splitlines()
    while rest:
        heading = HEADING.fullmatch(rest[0])
        if heading is None:
            lines.append(rest.pop(0))
            continue
        rest.pop(0)
        block: list[str] = []
        while rest and (not rest[0].strip() or rest[0].startswith(" ")):
            block.append(rest.pop(0))
        lines += ["", f"**{SECTIONS[heading[1]]}**", "", *_items(heading[1], block), ""]
    return linked(lines, link).strip()


def split_attributes(docstring: str) -> tuple[str, dict[str, str]]:
    """Return a docstring without its section `Attributes:`, and the description of each attribute."""
    lines = inspect.cleandoc(docstring).splitlines()
    if "Attributes:" not in lines:
        return docstring, {}
    start = stop = lines.index("Attributes:") + 1
    while stop < len(lines) and (not lines[stop].strip() or lines[stop].startswith(" ")):
        stop += 1
    descriptions: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.cleandoc("\n".join(["", *lines[start:stop]])).splitlines():
        item = ITEM.fullmatch(line)
        names = item["names"].split(", ") if item else names
        for name in names:
            descriptions[name] = item["text"] if item else f"{descriptions[name]}\n{line.strip()}"
    return "\n".join([*lines[: start - 1], *lines[stop:]]), descriptions


def first_sentence(docstring: str, link: Link) -> str:
    """Return the first sentence of a docstring on one line, for tables."""
    paragraph = " ".join(inspect.cleandoc(docstring).partition("\n\n")[0].split())
    sentence = re.split(r"(?<=[^.\s]\w)\.(?= [A-Z`])", paragraph)[0].rstrip(".")
    return linked([sentence], link).replace("|", "\\|")


def _items(section: str, block: list[str]) -> list[str]:
    """Format `name: text` lines as list items; text without a name is unchanged, as in `Returns:`."""
    mark = "`" if section == "Raises" else "``"  # double backticks are not linked: parameters have no page
    lines: list[str] = []
    for line in inspect.cleandoc("\n".join(["", *block])).splitlines():
        item = ITEM.fullmatch(line)
        if item:
            names = ", ".join(f"{mark}{name}{mark}" for name in item["names"].split(", "))
            lines.append(f"- {names}: {item['text']}")
        elif lines and lines[0].startswith("- "):
            lines.append(f"  {line.strip()}" if line.strip() else "")
        else:
            lines.append(line)
    return lines


def linked(lines: list[str], link: Link) -> str:
    """Link inline code that is a documented name; code blocks are unchanged."""

    def replace(code: re.Match[str]) -> str:
        name = code[1].removesuffix("()")
        target = link(name) if NAME.fullmatch(name) else None
        return f"{{py:obj}}`{code[1]} <{target}>`" if target else code[0]

    done, fence = [], None
    for line in lines:
        mark = FENCE.match(line)
        if mark and fence is None:
            fence = mark[1]
        elif mark and line.strip() == fence:
            fence = None
        elif fence is None:
            line = CODE.sub(replace, line)
        done.append(line)
    return "\n".join(done)
