"""Lock that keeps two runs from writing to the same run folder. Torch-free.

The lock is held on a file that names its holder and is removed on release. The kernel drops the lock when the process
ends, so a file left behind by a killed run is not locked. On file systems without locks, a run warns and continues.
"""

from __future__ import annotations

import fcntl
import io
import os
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

from meshwright.errors import InputError, continue_command
from meshwright.log import get_logger

LOCK = "run.lock"

_log = get_logger(__name__)


def hold_folder(folder: Path, hold: ExitStack) -> None:
    """Lock the existing `folder` until `hold` is closed or this process ends.

    Raises:
        InputError: another run holds the lock; the message names its process and host.
    """
    path = folder / LOCK
    try:
        file = _locked(path)
    except BlockingIOError:
        raise InputError(
            f"{folder} is being written by another run: {_holder(path)}",
            where=str(path),
            rule="one run at a time writes to a run folder",
            fix=f"another --out; or {continue_command(folder)}, once that run has ended",
        ) from None
    except OSError as error:
        _log.warning("can't lock %s (%s): another run could write to the same folder", folder, error)
        return
    hold.callback(_release, file, path)


def _locked(path: Path) -> io.FileIO:
    """Open and lock the file; reopen it if the previous holder removed it in between."""
    while True:
        file = path.open("ab", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):
                with suppress(OSError):  # the lock is held even if the disk is full
                    file.truncate(0)
                    file.write(f"process {os.getpid()} on host {socket.gethostname()}\n".encode())
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def _is_at(file: io.FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace").strip() or "it has just started"
    except OSError:
        return "it has just ended"


def _release(file: io.FileIO, path: Path) -> None:
    with suppress(OSError):
        path.unlink()  # still locked, so the file can't belong to another run
    file.close()
