"""Colour only on a terminal, and never where NO_COLOR is set."""

from __future__ import annotations

import os
from io import TextIOWrapper
from typing import TextIO

CODES = {"red": "31", "green": "32", "yellow": "33", "bold": "1", "dim": "2"}

CLEAR_LINE = "\r\x1b[2K"
"""Puts a terminal's cursor at the start of its line, now empty."""


def tolerate(*streams: TextIO) -> None:
    """Have streams write `?` for what their encoding lacks, where they would raise."""
    for stream in streams:
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def is_terminal(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that can rewrite its line."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def use_color(stream: TextIO) -> bool:
    """Whether escape codes belong on `stream`."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def paint(text: str, style: str, stream: TextIO) -> str:
    """`text` in a style, where the stream shows it."""
    return f"\x1b[{CODES[style]}m{text}\x1b[0m" if use_color(stream) else text
