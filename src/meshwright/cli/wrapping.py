"""Lines that fit a terminal: text broken between words, never between a figure and its unit.

Colors are disabled if NO_COLOR is set.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from io import TextIOWrapper
from typing import TextIO

FIGURE, NO_BREAK = re.compile(r"(?<=[\d×=·]) | (?=[×=])"), "\u00a0"
CODE = re.compile(r"\x1b\[[0-9;]*m")
"""A terminal's code for a style, which takes no column."""


def wrapped(text: str, columns: int, *, indent: str = "", more: str = "    ") -> Iterator[str]:
    """Yield the lines of one line of text, with `indent` before the first and `more` before all others.

    It is broken at spaces; a word that is longer than a line stays whole. A terminal's codes take no width.
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


CODES = {"red": "31", "green": "32", "yellow": "33", "bold": "1", "dim": "2"}

CLEAR_LINE = "\r\x1b[2K"
"""Escape sequence that clears the line and moves the cursor to its start."""


def tolerate(*streams: TextIO) -> None:
    """Make streams write `?` for characters that they can't encode, instead of raising."""
    for stream in streams:
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def is_terminal(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal that can overwrite the current line."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def use_color(stream: TextIO) -> bool:
    """Return whether to write color codes to `stream`."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def paint(text: str, style: str, stream: TextIO) -> str:
    """Return `text` wrapped in a style's color codes if the stream supports colors."""
    return f"\x1b[{CODES[style]}m{text}\x1b[0m" if use_color(stream) else text
