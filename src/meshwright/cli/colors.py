"""Colors on a terminal, unless NO_COLOR is set."""

from __future__ import annotations

import os
from io import TextIOWrapper
from typing import TextIO

CODES = {"red": "31", "green": "32", "yellow": "33", "bold": "1", "dim": "2"}

CLEAR_LINE = "\r\x1b[2K"
"""Escape code that clears the line and returns to its start."""


def tolerate(*streams: TextIO) -> None:
    """Let streams write `?` for characters missing from their encoding instead of raising."""
    for stream in streams:
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def is_terminal(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal that can rewrite its line."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def use_color(stream: TextIO) -> bool:
    """Return whether to write color codes to `stream`."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def paint(text: str, style: str, stream: TextIO) -> str:
    """Return `text` in a style if the stream shows colors."""
    return f"\x1b[{CODES[style]}m{text}\x1b[0m" if use_color(stream) else text
