"""Terminal colors, disabled if NO_COLOR is set."""

from __future__ import annotations

import os
from io import TextIOWrapper
from typing import TextIO

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
