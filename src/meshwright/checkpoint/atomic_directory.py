"""Directory protocol that creates, replaces and removes checkpoints atomically, without importing torch.

[Note: a kill at any instant]
A checkpoint is a directory `<root>/<step>` of data files and a `manifest.json` that lists the size and hash of
each. Only one run writes to a root. Anything that is not yet, or no longer, a checkpoint has a name that
`list_checkpoints` ignores, and every name change is an atomic rename:

- before and after: lock `.saving` in the root, so that a second process that saves there is refused; unlock it
- saving: data into `.tmp-<step>`, each file flushed; the manifest last; flush the directory; rename it to
  `<step>`; flush the root
- removing: rename to `.del-<step>`; only then delete its content
- saving a step again: rename the old one to `<step>.old`, which still counts as a checkpoint of that step;
  rename the new one to `<step>`; remove the old one

A kill leaves at most a `.tmp-`, a `.del-`, or an `.old` beside its complete successor; `clean` removes those.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    encode,
    list_checkpoints,
    read_manifest,
    size_problem,
    sync_directory,
    write_file,
)
from meshwright.errors import CheckpointError, RunError
from meshwright.log import get_logger

LOCK = ".saving"
"""File in the root that the process that saves there holds locked, with its name. The lock ends with the process."""
_LEFTOVER = re.compile(r"\.(tmp|del)-\d{8,}(\.old)?")

_log = get_logger(__name__)


def final_path(root: Path, step: int) -> Path:
    """Return the path of the complete checkpoint of `step`."""
    return root / f"{step:08d}"


def temporary_path(root: Path, step: int) -> Path:
    """Return the path at which the checkpoint of `step` is assembled."""
    return root / f".tmp-{step:08d}"


def lock(root: Path) -> int:
    """Lock `root` for a save, and return the descriptor for `unlock`. File systems without locks are not locked.

    Raises:
        RunError: another process saves to `root`.
        OSError: the directory cannot be created or written to.
    """
    _make_directory(root)
    while True:
        fd = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(fd, 1000).decode(errors="replace") or "another process"
            os.close(fd)
            raise RunError(
                f"{owner} is saving a checkpoint here",
                where=str(root),
                rule="only one run saves to a folder, one checkpoint at a time",
                fix="give each run a folder of its own, or save again when the other process is done",
            ) from None
        except OSError:
            return fd
        if (root / LOCK).exists() and os.path.samestat(os.stat(root / LOCK), os.fstat(fd)):
            with suppress(OSError):  # a full disk is reported with what it has no room for
                os.truncate(fd, 0)
                os.write(fd, f"process {os.getpid()} on {socket.gethostname()}".encode())
            return fd
        os.close(fd)  # its owner removed it in the meantime


def unlock(root: Path, fd: int) -> None:
    """Undo `lock`."""
    (root / LOCK).unlink(missing_ok=True)
    os.close(fd)


def begin(root: Path, step: int) -> Path:
    """Create an empty directory for the files of the checkpoint of `step`, to be passed to `commit`.

    Raises:
        OSError: the directory cannot be created.
    """
    temporary = temporary_path(root, step)
    _make_directory(root)
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir()
    return temporary


def commit(
    temporary: Path, *, step: int, model: Mapping[str, Any], run: Mapping[str, Any], files: Mapping[str, FileEntry]
) -> Path:
    """Turn the directory from `begin` into the checkpoint of `step` atomically, and return its final path.

    It contains every file of `files`, flushed to disk by its writer (`DurableFile`).

    Raises:
        RunError: a file is missing or has the wrong size.
        CheckpointError: `model` or `run` cannot be written as JSON.
        OSError: the manifest cannot be written, or a rename failed.
    """
    root, final = temporary.parent, final_path(temporary.parent, step)
    for name, entry in files.items():
        if problem := size_problem(temporary / name, entry):
            raise RunError(
                f"{name} {problem} on rank 0, although its rank has written it",
                where=str(temporary),
                rule="rank 0 must see the files of all ranks to commit a checkpoint",
                fix="put the run folder on a file system that all nodes share",
            )
    write_file(temporary / MANIFEST, encode(step=step, model=model, run=run, files=files))
    sync_directory(temporary)
    old = final.with_name(final.name + ".old")
    if _has_manifest(final):
        _remove([old])
        final.rename(old)
    else:
        _remove([final])
    temporary.rename(final)
    sync_directory(root)
    try:
        _remove([old])
    except OSError as error:  # the checkpoint is saved; `clean` will try again
        _log.warning("%s is saved, but the checkpoint that it replaces can't be removed: %s", final, error)
    return final


def prune(root: Path, keep: int, *, protect: Path | None = None) -> list[Path]:
    """Remove all checkpoints except `protect` and the `keep` newest, and return the removed paths.

    A directory without a readable manifest is neither counted nor removed, as its data may still be recoverable.
    `protect` is for runs resumed from an earlier step: their new checkpoint does not have the highest step.

    Raises:
        OSError: a directory cannot be removed; the remaining ones are left in place.
    """
    complete = [path for path in list_checkpoints(root) if _has_manifest(path)]
    doomed = [path for path in complete[: max(0, len(complete) - keep)] if path != protect]
    _remove(doomed)
    return doomed


def clean(root: Path) -> list[Path]:
    """Remove what interrupted saves and removals left behind, and return the paths. Must not run during a save.

    Raises:
        OSError: a directory cannot be removed.
    """
    if not root.is_dir():
        return []
    leftovers = sorted(entry for entry in root.iterdir() if _LEFTOVER.fullmatch(entry.name))
    for entry in leftovers:
        shutil.rmtree(entry)
    old = [path for path in list_checkpoints(root) if path.suffix == ".old"]
    replaced = [path for path in old if _has_manifest(path.with_suffix(""))]
    _remove(replaced)
    removed = leftovers + replaced
    if removed:
        _log.info("removed leftovers of an interrupted save in %s: %s", root, [path.name for path in removed])
    return removed


def _make_directory(path: Path) -> None:
    if not path.is_dir():
        _make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def _has_manifest(path: Path) -> bool:
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.exists():
            doomed = path.with_name(f".del-{path.name}")
            if doomed.exists():
                shutil.rmtree(doomed)
            path.rename(doomed)
            sync_directory(path.parent)
            shutil.rmtree(doomed)
