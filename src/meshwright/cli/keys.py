"""`meshwright keys`: search the configuration keys by name, by meaning, and by what other frameworks call them."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from meshwright.cli.wrapping import paint, show
from meshwright.errors import InputError


def keys(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WORD]...", help="Part of a name, of a meaning, or another framework's name."),
    ] = None,
) -> None:
    """Find configuration keys, with their defaults, meanings and names in other frameworks; all without WORD."""
    from meshwright.config.known_keys import known_keys, search

    text = " ".join(words or ())
    found = search(text) if text else known_keys()
    if not found:
        raise InputError(
            f"no key has {text!r} in its name or meaning",
            where="command line",
            rule="keys are found by part of a name, by words of their meaning, and by names of other frameworks",
            fix="meshwright keys, which lists all",
        )
    for key in found:
        families = f" · {', '.join(key.families)} only" if key.families else ""
        show(f"{paint(f'{key.name}={key.default}', 'bold', sys.stdout)}  {key.type.replace('`', '')}{families}")
        show(f"  {key.meaning}", more="  ")
        if key.elsewhere and text:
            show(f"  elsewhere: {', '.join(key.elsewhere)}", more="  ")
