"""Cache files that hold arrays followed by metadata, and where they are: tokenised text, indices of packed documents.

    arrays | metadata as JSON | length of the JSON, uint64 | magic, 8 bytes            (all little-endian)

A file is written under a temporary name, synced and then renamed, so a killed process never leaves a partial file
under the final name; a file of inconsistent length is rebuilt. One process per machine builds a file while the others
wait; if it is killed, another of them goes on, with what is in the file's folder of parts (see `tokenise.py`).
Without file locks several may build it at once: they write the same bytes, the last rename wins, and memory maps
of an earlier file stay valid.

Torch-free, and numpy-free: plans look for what is known of foreign models here.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Protocol, TypeVar

from meshwright.errors import DataError
from meshwright.log import get_logger
from meshwright.output_files import user_cache

MAGIC = b"MWTOKEN1"
_LENGTH_BYTES = 8
_STALE_SECONDS = 24 * 3600
_STALE_PARTS_SECONDS = 7 * _STALE_SECONDS

_log = get_logger(__name__)


class Metadata(Protocol):
    """Contents of a cache file: a dataclass of JSON values. Its constructor raises ValueError if they contradict."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def payload_bytes(self) -> int:
        """Size of the arrays in the cache file."""


M = TypeVar("M", bound=Metadata)


def open_or_build(
    name: str,
    kind: type[M],
    *,
    cache_dir: str | None,
    build: Callable[[BinaryIO], M],
    is_usable: Callable[[M], bool] = lambda _: True,
) -> tuple[Path, M]:
    """Return the path and metadata of the cache file `name`, building it if it is missing, damaged or not usable.

    An existing file is used even in a read-only directory. If a file must be built and `cache_dir` (default
    `$XDG_CACHE_HOME/meshwright` or `~/.cache/meshwright`) is not writable, falls back to a per-user directory under
    the system's temporary directory and logs a warning.

    Args:
        build: function that writes the arrays to a file and returns their metadata.
        is_usable: function that says whether the file has what the caller needs; otherwise it is replaced.

    Raises:
        DataError: the file could not be written.
    """
    preferred = preferred_directory(cache_dir)
    if preferred is not None and (metadata := _usable(preferred / name, kind, is_usable)) is not None:
        return preferred / name, metadata
    directory = writable_directory(preferred)
    if directory != preferred and (metadata := _usable(directory / name, kind, is_usable)) is not None:
        return directory / name, metadata
    _remove_stale(directory)
    path = directory / name
    with build_lock(path):
        metadata = _usable(path, kind, is_usable)
        return path, metadata if metadata is not None else write(path, build)


def parts_folder(path: Path) -> Path:
    """Return the folder of finished parts of a cache file: removed a week after the last was added, if not before."""
    return path.with_name(f"{path.name}.parts")


def write(path: Path, build: Callable[[BinaryIO], M]) -> M:
    """Write a cache file, which appears when it is complete.

    Raises:
        DataError: it can't be written.
    """
    with atomic_write(path) as file:
        metadata = build(file)
        assert file.tell() == metadata.payload_bytes, "build returned the wrong payload size"
        encoded = json.dumps(asdict(metadata)).encode("utf-8")
        file.write(encoded + len(encoded).to_bytes(_LENGTH_BYTES, "little") + MAGIC)
    return metadata


def load(path: Path, kind: type[M]) -> M | None:
    """Return the metadata of a cache file, or None if the file is missing or damaged."""
    try:
        with path.open("rb") as file:
            return _load(file, kind)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        _log.warning("cache file %s is damaged and will be rebuilt: %s", path, error)
        return None


def _usable(path: Path, kind: type[M], is_usable: Callable[[M], bool]) -> M | None:
    metadata = load(path, kind)
    return metadata if metadata is not None and is_usable(metadata) else None


def _load(file: BinaryIO, kind: type[M]) -> M:
    """Read the metadata; raise ValueError or TypeError if the file is truncated or malformed."""
    size = os.fstat(file.fileno()).st_size
    tail = _LENGTH_BYTES + len(MAGIC)
    if size < tail:
        raise ValueError(f"{size} bytes is too short")
    file.seek(size - tail)
    footer = file.read(tail)
    length = int.from_bytes(footer[:_LENGTH_BYTES], "little")
    if footer[_LENGTH_BYTES:] != MAGIC or length > size - tail:
        raise ValueError("missing or corrupt footer")
    file.seek(size - tail - length)
    metadata = kind(**json.loads(file.read(length)))
    if size != metadata.payload_bytes + length + tail:
        raise ValueError(f"{size} bytes, expected {metadata.payload_bytes + length + tail}")
    return metadata


@contextmanager
def build_lock(path: Path) -> Iterator[None]:
    """Prevent other processes on this machine from building `path` at the same time.

    The lock saves work but is not needed for correctness: file systems without locks are fine, and a lock removed while
    another process waits for it merely lets two processes build the same file.
    """
    lock = path.with_name(f"{path.name}.lock")
    with ExitStack() as stack:
        try:
            file = stack.enter_context(lock.open("ab"))
            stack.callback(lock.unlink, missing_ok=True)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.info("waiting for another process to build %s", path)
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            _log.info("cannot lock %s (%s): other processes may build the same file", path, error)
        yield


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Write a file that appears at `path` only if the block succeeds."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise DataError(
            f"cannot write the cache file {path}: {error.strerror or error}",
            where="data.cache_dir",
            rule="tokenised text and packed documents are cached in data.cache_dir (default ~/.cache/meshwright)",
            fix="free some disk space, or data.cache_dir=<a directory on another disk>",
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


def _remove_stale(directory: Path) -> None:
    """Remove what killed processes left behind: temporary files after a day, parts a week after the last was added."""
    now = time.time()
    for path in (*directory.glob("*.tmp"), *directory.glob("*.tokens.parts")):
        try:
            age = now - path.stat().st_mtime
            if path.is_dir() and age > _STALE_PARTS_SECONDS:
                shutil.rmtree(path)
            elif path.is_file() and age > _STALE_SECONDS:
                path.unlink()
        except OSError:
            continue


def preferred_directory(cache_dir: str | None) -> Path | None:
    """Return the configured cache directory or the user's default; None without a home directory."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    return user_cache()


def writable_directory(preferred: Path | None) -> Path:
    """Return the preferred directory, created if needed, or one for this user under the system's temporary directory if
    it is not writable, with a warning."""
    problem = "no home directory"
    if preferred is not None:
        try:
            preferred.mkdir(parents=True, exist_ok=True)
            if os.access(preferred, os.W_OK | os.X_OK):
                return preferred
            problem = f"{preferred} is not writable"
        except OSError as error:
            problem = f"cannot create {preferred} ({error.strerror})"
    fallback = temporary_directory()
    _log.warning("%s: caching tokenised text in %s (set data.cache_dir to change this)", problem, fallback)
    return fallback


def temporary_directory() -> Path:
    """Return a directory only this user can write to, the same for every process, since /tmp is world-writable."""
    path = Path(tempfile.gettempdir()) / f"meshwright-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
            return path
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="meshwright-"))
