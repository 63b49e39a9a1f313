"""Lock of a run folder, so that one run at a time writes to it. Torch-free.

The lock is held on a file that names its holder and is removed on release; the kernel drops it with the process, so the
file that a killed run leaves behind locks nothing. On file systems without locks a run continues with a warning.
"""

from __future__ import annotations

import fcntl
import io
import os
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

from meshwright.errors import InputError
from meshwright.log import get_logger

LOCK = "run.lock"

_log = get_logger(__name__)


def hold_folder(folder: Path, hold: ExitStack) -> None:
    """Lock the existing `folder` until `hold` is closed or this process ends.

    Raises:
        InputError: another run holds the lock; the message has its process and host.
    """
    path = folder / LOCK
    try:
        file = _locked(path)
    except BlockingIOError:
        raise InputError(
            f"{folder} is being written by another run: {_holder(path)}",
            where=str(path),
            rule="one run at a time writes to a run folder",
            fix="another --out; or --resume auto, once that run has ended",
        ) from None
    except OSError as error:
        _log.warning("can't lock %s (%s): another run could write to the same folder", folder, error)
        return
    hold.callback(_release, file, path)


def _locked(path: Path) -> io.FileIO:
    """Open and lock the file; open it again if its last holder removed it in between."""
    while True:
        file = path.open("ab", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):
                with suppress(OSError):  # on a full disk the lock still holds
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
        path.unlink()  # while locked, so it can't be another run's
    file.close()
