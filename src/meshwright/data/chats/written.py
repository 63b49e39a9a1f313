"""A conversation as text, and the parts of it that count in the loss."""

from __future__ import annotations

from typing import NamedTuple

Span = tuple[int, int]
"""First character of a part of a text, and the one after its last."""


class Written(NamedTuple):
    """Text of messages.

    Args:
        text: the text.
        spans: parts of it that the assistant says, as far as they are known.
    """

    text: str
    spans: tuple[Span, ...]
