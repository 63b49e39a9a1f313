"""Files that a command writes at its end: checked before it starts, so that nothing is computed for nowhere."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from meshwright.errors import InputError


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
