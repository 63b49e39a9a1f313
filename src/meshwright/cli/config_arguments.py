"""The words of a command line: a preset's name or a file, then `section.key=value`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshwright.errors import InputError

WORDS_HELP = "A preset's name or a TOML file (llama-tiny when left out), then section.key=value …"


def split_words(words: Sequence[str] | None) -> tuple[str | None, list[str]]:
    """The source, None for the default preset, and the overrides."""
    words = list(words or ())
    if words and "=" not in words[0]:
        return words[0], words[1:]
    return None, words


def path_of(option: str, text: str | None) -> Path | None:
    """The path that an option was given, None without it.

    Raises:
        InputError: it is empty, which as a path would be the current folder.
    """
    if text == "":
        raise InputError(
            f"{option} is empty",
            where=f"command line, {option}",
            rule=f"{option} takes a path; a shell variable that is not set gives an empty one",
            fix=f"leave {option} out, or {option} . for the current folder",
        )
    return None if text is None else Path(text)
