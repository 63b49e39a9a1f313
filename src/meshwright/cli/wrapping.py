"""Lines that fit a terminal: text broken between words, never between a figure and its unit."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from typing import TextIO

from meshwright.cli.colors import is_terminal

FIGURE, NO_BREAK = re.compile(r"(?<=[\d×=·]) | (?=[×=])"), "\u00a0"
CODE = re.compile(r"\x1b\[[0-9;]*m")
"""A terminal's code for a style, which takes no column."""


def wrapped(text: str, columns: int, *, indent: str = "", more: str = "    ") -> Iterator[str]:
    """Yield the lines of a text that is broken at spaces; a word that is longer than a line stays whole.

    Args:
        text: one line, which may have a terminal's codes.
        columns: width of a line.
        indent: put before the first line.
        more: put before all others.
    """
    first, *words = FIGURE.sub(NO_BREAK, text).split(" ")
    line = indent + first
    for word in words:
        if line.strip() and len(CODE.sub("", f"{line} {word}")) > columns:
            yield line.replace(NO_BREAK, " ")
            line = more + word
        else:
            line += f" {word}"
    yield line.replace(NO_BREAK, " ")


def show(text: str, stream: TextIO | None = None, *, more: str = "    ") -> None:
    """Print lines; on a terminal, each broken between words to its width, with `more` before what follows its first."""
    stream, lines = stream or sys.stdout, text.split("\n")
    if is_terminal(stream):
        columns = shutil.get_terminal_size().columns
        lines = [one for line in lines for one in wrapped(line, columns, more=more)]
    for line in lines:
        print(line, file=stream)
