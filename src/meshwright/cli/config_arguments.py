"""Arguments that specify a configuration: a preset or a file, followed by `section.key=value` overrides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from meshwright.errors import InputError

WORDS_HELP = (
    "A preset, a TOML file or a run folder (default: llama-tiny), then section.key=value …, also as --lr 1e-3. "
    "meshwright keys [WORD] lists them."
)


def complete_words(incomplete: str) -> list[str]:
    """Return presets and files, keys, and values of a key, that begin like the word that is being typed."""
    from meshwright.config.overlay import fields
    from meshwright.config.source import preset_names
    from meshwright.models.contract.family import family_names

    known = {key: field for kind in family_names() for key, field in fields(kind).items()}
    key, equals, _ = incomplete.partition("=")
    if equals:
        words = [f"{key}={value}" for value in _choices(known[key].annotation)] if key in known else []
    else:
        runs = (str(file.parent) for file in Path().glob("runs/*/config.toml"))
        words = [*preset_names(), *map(str, Path().glob("*.toml")), *runs, *(f"{key}=" for key in known)]
    return [word for word in words if word.startswith(incomplete)]


def _choices(annotation: Any) -> list[str]:
    """Return the values of a key that has a few."""
    kinds = get_args(annotation) or (annotation,)
    return ["true", "false"] if bool in kinds else [str(kind) for kind in kinds if isinstance(kind, str)]


Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[PRESET|FILE.toml|RUN] [KEY=VALUE]...", help=WORDS_HELP, autocompletion=complete_words),
]
"""Arguments of a command that takes a configuration."""


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
