"""Files that are hashed while they are written, and flushed to disk.

They use plain `write` calls rather than a memory map, so a full disk raises an `OSError` instead of killing the process
with a bus error. The hash is computed from the bytes in memory, to detect corruption by a failing disk or controller.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

CHUNK_BYTES = 8 << 20
"""Bytes hashed and written at a time; few enough to stay in the processor's cache in between."""


@dataclass(frozen=True)
class FileEntry:
    """Expected size in bytes and hex SHA-256 of a file's content."""

    num_bytes: int
    sha256: str


class DurableFile:
    """A new file being written; `finish` flushes it to disk and returns its size and hash.

    Raises:
        FileExistsError: the file exists, which means that two writers use the same name.
        OSError: from any method, as reported by the operating system (`ENOSPC` for a full disk).
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
        """Flush the file to disk, and return its manifest entry."""
        os.fsync(self._fd)
        return FileEntry(self.bytes_written, self._hash.hexdigest())

    def __enter__(self) -> DurableFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)


def write_file(path: Path, data: bytes) -> FileEntry:
    """Write a new file, and flush it to disk.

    Raises:
        OSError: as in `DurableFile`.
    """
    with DurableFile(path) as file:
        file.write(data)
        return file.finish()


def hash_file(path: Path) -> FileEntry:
    """Return the size and hash of a file.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(file.tell(), digest)


def sync_directory(path: Path) -> None:
    """Flush a directory to disk, so that names created, renamed or removed in it are durable.

    Raises:
        OSError: the directory cannot be opened or flushed.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
