"""Arguments that specify a configuration: a preset or a file, followed by `section.key=value` overrides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshwright.errors import InputError

WORDS_HELP = "A preset or a TOML file (default: llama-tiny), then section.key=value …"


def split_words(words: Sequence[str] | None) -> tuple[str | None, list[str]]:
    """Split arguments into the source (None for the default preset) and the overrides."""
    words = list(words or ())
    if words and "=" not in words[0]:
        return words[0], words[1:]
    return None, words


def path_of(option: str, text: str | None) -> Path | None:
    """Return the path given to an option, or None without it.

    Raises:
        InputError: the text is empty, which would otherwise be read as the current folder.
    """
    if text == "":
        raise InputError(
            f"{option} is empty",
            where=f"command line, {option}",
            rule=f"{option} takes a path; an unset shell variable expands to an empty one",
            fix=f"leave {option} out, or {option} . for the current folder",
        )
    return None if text is None else Path(text)
