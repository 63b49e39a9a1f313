"""Files that are on the disk when we say so, and whose bytes we can recognise later.

Plain `write` calls, never a memory map: a full disk is then an `OSError` at the write instead of a bus error
that kills the process. The hash is taken from the bytes in memory on their way out, so what a failing disk or
controller makes of them afterwards does not match it.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

CHUNK_BYTES = 8 << 20
"""Bytes hashed and written at a time: so few that the write finds them still in the processor's cache."""


@dataclass(frozen=True)
class FileEntry:
    """What a file must be: its size in bytes and the SHA-256 of its content, in hex."""

    num_bytes: int
    sha256: str


class DurableFile:
    """A new file being written; `finish` flushes it to the disk and says what was written.

    Raises:
        FileExistsError: the file exists: two writers were given one name.
        OSError: from any method, as the operating system reports it (`ENOSPC` for a full disk).
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._hash = hashlib.sha256()
        self.bytes_written = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`, a contiguous buffer of any item type."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = view[start : start + CHUNK_BYTES]
            self._hash.update(chunk)
            while len(chunk):
                num_bytes = os.write(self._fd, chunk)
                self.bytes_written += num_bytes
                chunk = chunk[num_bytes:]

    def finish(self) -> FileEntry:
        """Wait until the disk has everything; the file's entry for the manifest."""
        os.fsync(self._fd)
        return FileEntry(self.bytes_written, self._hash.hexdigest())

    def __enter__(self) -> DurableFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)


def write_file(path: Path, data: bytes) -> FileEntry:
    """Write a new file and wait until the disk has it.

    Raises:
        OSError: as `DurableFile`.
    """
    with DurableFile(path) as file:
        file.write(data)
        return file.finish()


def hash_file(path: Path) -> FileEntry:
    """Read a file and say what it is.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(file.tell(), digest)


def sync_directory(path: Path) -> None:
    """Wait until the disk has the directory's entries: names created, renamed and removed in it.

    Raises:
        OSError: the directory cannot be opened or flushed.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
