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


def show(text: str, *, file: TextIO | None = None, more: str = "    ") -> None:
    """Print one line, broken to the width of a terminal; whole elsewhere, for programs that read it.

    Args:
        text: the line.
        file: stdout if None.
        more: put before all lines but the first.
    """
    file = sys.stdout if file is None else file
    lines = wrapped(text, shutil.get_terminal_size().columns, more=more) if is_terminal(file) else [text]
    print("\n".join(lines), file=file)
