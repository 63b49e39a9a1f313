"""The words of a command line: a preset's name or a file, then `section.key=value`."""

from __future__ import annotations

from collections.abc import Sequence

WORDS_HELP = "A preset's name or a TOML file (llama-tiny when left out), then section.key=value …"


def split_words(words: Sequence[str] | None) -> tuple[str | None, list[str]]:
    """The source, None for the default preset, and the overrides."""
    words = list(words or ())
    if words and "=" not in words[0]:
        return words[0], words[1:]
    return None, words
