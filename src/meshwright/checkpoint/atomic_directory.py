"""The directory protocol: how files become a checkpoint and stop being one, so that no kill loses one.

Torch-free.

[Note: a kill at any instant]
A checkpoint is a directory `<root>/<step>` of data files and a `manifest.json` that names every one of them
with its size and hash. One run writes to a root. Everything that is not yet, or no longer, a checkpoint has a
name that `list_checkpoints` does not look at, and a name changes by one atomic rename:

- saving: data into `.tmp-<step>`, each file flushed; the manifest last; flush the directory; rename it to
  `<step>`; flush the root
- removing: rename to `.del-<step>`; only then delete what is in it
- saving a step again: rename the old one to `<step>.old`, which still counts as a checkpoint of that step;
  rename the new one to `<step>`; remove the old one. Between the renames the old one stands for that step

A kill leaves at most a `.tmp-`, a `.del-`, or an `.old` beside its complete successor; `clean` removes those.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from meshwright.checkpoint.durable_files import FileEntry, sync_directory, write_file
from meshwright.checkpoint.manifest import MANIFEST, encode, list_checkpoints, read_manifest, size_problem
from meshwright.errors import CheckpointError, RunError
from meshwright.log import get_logger

_LEFTOVER = re.compile(r"\.(tmp|del)-\d{8,}(\.old)?")

_log = get_logger(__name__)


def final_path(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` is, once complete."""
    return root / f"{step:08d}"


def temporary_path(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` is put together."""
    return root / f".tmp-{step:08d}"


def begin(root: Path, step: int) -> Path:
    """Make the empty directory that the files of the checkpoint of `step` are written to; then `commit` it.

    Raises:
        OSError: it cannot be made.
    """
    temporary = temporary_path(root, step)
    _make_directory(root)
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir()
    return temporary


def commit(
    temporary: Path,
    *,
    step: int,
    model: Mapping[str, Any],
    run: Mapping[str, Any],
    files: Mapping[str, FileEntry],
) -> Path:
    """Make the checkpoint of `step` of the directory that `begin` gave, in one instant; its final path.

    Args:
        temporary: holds every file of `files`, flushed to the disk by whoever wrote it (`DurableFile`).
        step: optimizer steps done.
        model: the model's identity.
        run: what the trainer needs to go on.
        files: the entry of every file, from its writer.

    Raises:
        RunError: a file is not there with its size.
        CheckpointError: `model` or `run` can't be JSON.
        OSError: the manifest cannot be written, or a name not changed.
    """
    root, final = temporary.parent, final_path(temporary.parent, step)
    for name, entry in files.items():
        if problem := size_problem(temporary / name, entry):
            raise RunError(
                f"{name} {problem}, though its rank has written it",
                where=str(temporary),
                rule="rank 0 sees the files of all ranks before it calls them a checkpoint",
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
    except OSError as error:  # what was asked for is done; `clean` tries again
        _log.warning("%s is saved, but the one it replaces can't be removed: %s", final, error)
    return final


def prune(root: Path, keep: int, *, protect: Path | None = None) -> list[Path]:
    """Remove all but the `keep` newest checkpoints, and `protect` if given; the paths that are gone.

    A directory without a readable manifest neither counts nor is removed: it may be someone's last hope. A
    run that went back to an earlier step protects what it just saved, which is then not the newest by step.

    Raises:
        OSError: a directory cannot be removed; those after it are still there.
    """
    complete = [path for path in list_checkpoints(root) if _has_manifest(path)]
    doomed = [path for path in complete[: max(0, len(complete) - keep)] if path != protect]
    _remove(doomed)
    return doomed


def clean(root: Path) -> list[Path]:
    """Remove what interrupted saves and removals left; the paths that are gone. Not while someone saves.

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
    gone = leftovers + replaced
    if gone:
        _log.info("removed what an interrupted save left in %s: %s", root, [path.name for path in gone])
    return gone


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
