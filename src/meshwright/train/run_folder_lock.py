"""One run at a time in a folder: a lock that goes with the process that holds it, however that ends. Torch-free.

It is on a file that says who holds it, and that is removed when it is let go. The file that a killed run leaves locks
nothing. Where the file system knows no locks a run goes on without one.
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
    """Keep other runs out of `folder`, which exists, until `hold` is closed or this process ends.

    Raises:
        InputError: another run is there, with its process and host.
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
        _log.warning("no lock on %s (%s): nothing keeps another run from writing there too", folder, error)
        return
    hold.callback(_let_go, file, path)


def _locked(path: Path) -> io.FileIO:
    """The file, locked, and still the one of that name: its last holder may have removed it after it was opened."""
    while True:
        file = path.open("ab", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):
                with suppress(OSError):  # a full disk keeps the lock, not the words
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


def _let_go(file: io.FileIO, path: Path) -> None:
    with suppress(OSError):
        path.unlink()  # while it is locked: nobody else's
    file.close()
