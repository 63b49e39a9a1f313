"""Files that a command or a run writes: what can't be written is an error that says so, early where it can be."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.errors import InputError, RunError


def check_output(path: Path, *, where: str) -> None:
    """See that `path` can be written, and leave it as it was.

    Asked of the disk: permission bits say nothing of read-only mounts, nor to root.

    Args:
        path: a file to be; what is there is written over.
        where: the option that named it.

    Raises:
        InputError: it can't be written.
    """
    try:
        is_new = not path.exists()
        if not is_new and not path.is_file() and not path.is_dir():
            return  # opening a pipe may wait for its reader, and closing it would end him
        with open(path, "ab"):
            pass
        if is_new:
            os.unlink(path.resolve())  # of a link that leads nowhere yet, what it leads to
    except OSError as error:
        raise _cannot_write(path, error, where) from None


def write_output(path: Path, text: str, *, where: str) -> None:
    """Write `text` as the file `path`.

    Raises:
        InputError: it can't be written.
    """
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise _cannot_write(path, error, where) from None


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Give `path`, and turn a failure to write it within the block into an error that says so.

    Raises:
        RunError: it can't be written.
    """
    try:
        yield path
    except OSError as error:
        raise RunError(
            f"can't write {path.name}: {error.strerror or error}",
            where=str(path),
            rule="a run keeps its record in its folder; the checkpoints saved before are intact",
            fix="free some room there, then --resume auto",
        ) from error


def _cannot_write(path: Path, error: OSError, where: str) -> InputError:
    if isinstance(error, FileNotFoundError) and not path.parent.exists():
        return InputError(
            f"there is no folder {path.parent}",
            where=where,
            rule="a file is written into a folder that exists",
            fix=f"mkdir -p {shlex.quote(str(path.parent))}",
        )
    return InputError(
        f"can't write {path}: {error.strerror or error}",
        where=where,
        rule="what is written is a file, in a folder that can be written to",
        fix="another name or folder",
    )
