"""Output files of commands and runs, with early checks for write access and clear errors."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.errors import CONTINUE, InputError, RunError


def user_cache() -> Path | None:
    """Return `$XDG_CACHE_HOME/meshwright`, by default in `~/.cache`; None without a home directory."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(configured):  # the XDG specification requires relative paths to be ignored
        return Path(configured) / "meshwright"
    try:
        return Path.home() / ".cache" / "meshwright"
    except RuntimeError:
        return None


def check_output(path: Path, *, where: str) -> None:
    """Check that `path` is writable, without changing the file; `where` is the option that specified it.

    Opens the file, since permission bits don't reveal read-only mounts and don't apply to root.

    Raises:
        InputError: the file can't be written.
    """
    try:
        is_new = not path.exists()
        if not is_new and not path.is_file() and not path.is_dir():
            return  # opening a pipe may block until it has a reader, and closing it would send that reader EOF
        with open(path, "ab"):
            pass
        if is_new:
            os.unlink(path.resolve())  # resolve, since the path may be a dangling link
    except OSError as error:
        raise _cannot_write(path, error, where) from None


def write_output(path: Path, text: str, *, where: str) -> None:
    """Write `text` to `path`.

    Raises:
        InputError: the file can't be written.
    """
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise _cannot_write(path, error, where) from None


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Yield `path`, converting a failed write within the context into a `RunError`.

    Raises:
        RunError: the file can't be written.
    """
    try:
        yield path
    except OSError as error:
        raise RunError(
            f"can't write {path.name}: {error.strerror or error}",
            where=str(path),
            rule="a run writes its metrics to its folder; earlier checkpoints are intact",
            fix=f"free some space there, then {CONTINUE}",
        ) from error


def _cannot_write(path: Path, error: OSError, where: str) -> InputError:
    if isinstance(error, FileNotFoundError) and not path.parent.exists():
        return InputError(
            f"folder not found: {path.parent}",
            where=where,
            rule="the folder of an output file must exist",
            fix=f"mkdir -p {shlex.quote(str(path.parent))}",
        )
    return InputError(
        f"can't write {path}: {error.strerror or error}",
        where=where,
        rule="output needs a writable folder",
        fix="another name or folder",
    )
