"""Checks that tensors are exactly those of the configuration, for both directions."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from meshwright.errors import CheckpointError

CONFIG = "config.json"
FIX = "check that the weights match the configuration"


def train_command(folder: Path) -> str:
    """Return the command that trains the model of a folder as transformers has it, whose fix for what it doesn't accept
    leads on."""
    name = quote(str(folder))
    tokenizer = f" data.tokenizer={name}" if (folder / "tokenizer.json").is_file() else ""
    return f"meshwright run hf-tiny model.config={name} model.weights=folder{tokenizer}"


def check_names(present: set[str], expected: set[str], *, noun: str, where: str) -> None:
    """Check that no tensor is missing or unexpected.

    Raises:
        CheckpointError: one is; the message names the first and counts the others.
    """
    for problem, names in (("missing", expected - present), ("unexpected", present - expected)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(
                f"tensor {min(names)}{more} {'is' if len(names) == 1 else 'are'} {problem}",
                where=where,
                rule=f"the tensors are exactly those of the {noun} in the configuration",
                fix=train_command(Path(where)) if problem == "unexpected" and Path(where, CONFIG).is_file() else FIX,
            )


def check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...], *, where: str) -> None:
    """Check a tensor's shape.

    Raises:
        CheckpointError: it is not the configuration's.
    """
    if shape != expected:
        raise CheckpointError(
            f"{name} has shape {list(shape)}, expected {list(expected)} from the configuration",
            where=where,
            rule="tensor shapes match the configuration",
            fix=FIX,
        )
