"""Cache files that hold tokens followed by metadata.

    tokens | metadata as JSON | length of the JSON, uint64 | magic, 8 bytes            (all little-endian)

A file is written under a temporary name, synced and then renamed, so a killed process never leaves a partial file
under the final name; a file of inconsistent length is rebuilt. One process per machine builds a file while the others
wait. Without file locks several may build it at once: they write the same bytes, the last rename wins, and memory maps
of an earlier file stay valid. Torch-free.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import DataError
from meshwright.log import get_logger

MAGIC = b"MWTOKEN1"
_LENGTH = np.dtype("<u8")
_STALE_SECONDS = 24 * 3600

_log = get_logger(__name__)


@dataclass(frozen=True)
class CorpusMetadata:
    """Metadata of a corpus, as stored in a cache file.

    Args:
        dtype: element type of the tokens, little-endian (`|u1`, `<u2`, `<u4`).
        num_train: number of training tokens, which come first.
        num_validation: number of held-out tokens.
        payload_bytes: size of the tokens in the cache file; 0 if they are stored elsewhere.
        vocab_size: size of the smallest vocabulary that covers every id.
        validation_text_bytes: size of the held-out text; None if unknown.
        num_skipped: number of files skipped because they are not text.
        fingerprint: SHA-256 of the tokens (see `corpus_fingerprint.py`).
    """

    dtype: str
    num_train: int
    num_validation: int
    payload_bytes: int
    vocab_size: int
    validation_text_bytes: int | None
    num_skipped: int
    fingerprint: str


BuildFunction = Callable[[BinaryIO], CorpusMetadata]
"""Function that writes the tokens to a file and returns their metadata."""


def open_or_build(name: str, *, cache_dir: str | None, build: BuildFunction) -> tuple[Path, CorpusMetadata]:
    """Return the path and metadata of the cache file `name`, building it if it is missing or damaged.

    An existing file is used even in a read-only directory. If a file must be built and `cache_dir` (default
    `$XDG_CACHE_HOME/meshwright` or `~/.cache/meshwright`) is not writable, falls back to a per-user directory under
    the system's temporary directory and logs a warning.

    Raises:
        DataError: the file could not be written.
    """
    preferred = _preferred_directory(cache_dir)
    if preferred is not None and (metadata := load(preferred / name)) is not None:
        return preferred / name, metadata
    directory = _writable_directory(preferred)
    if directory != preferred and (metadata := load(directory / name)) is not None:
        return directory / name, metadata
    _remove_stale(directory)
    path = directory / name
    with _build_lock(path):
        metadata = load(path)
        return path, metadata if metadata is not None else _build_file(path, build)


def load(path: Path) -> CorpusMetadata | None:
    """Return the metadata of a cache file, or None if the file is missing or damaged."""
    try:
        with path.open("rb") as file:
            return _load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        _log.warning("cache file %s is damaged and will be rebuilt: %s", path, error)
        return None


def map_tokens(path: Path, metadata: CorpusMetadata) -> NDArray[np.unsignedinteger]:
    """Memory-map the tokens of a cache file, 1-D: training tokens, then held-out ones."""
    num_tokens = metadata.num_train + metadata.num_validation
    return np.asarray(np.memmap(path, dtype=metadata.dtype, mode="r", shape=(num_tokens,)))


def _build_file(path: Path, build: BuildFunction) -> CorpusMetadata:
    with _atomic_write(path) as file:
        metadata = build(file)
        assert file.tell() == metadata.payload_bytes, "build returned the wrong payload size"
        encoded = json.dumps(asdict(metadata)).encode("utf-8")
        file.write(encoded + np.array(len(encoded), _LENGTH).tobytes() + MAGIC)
    return metadata


def _load(file: BinaryIO) -> CorpusMetadata:
    """Read the metadata; raise ValueError or TypeError if the file is truncated or malformed."""
    size = os.fstat(file.fileno()).st_size
    tail = _LENGTH.itemsize + len(MAGIC)
    if size < tail:
        raise ValueError(f"{size} bytes is too short")
    file.seek(size - tail)
    footer = file.read(tail)
    length = int(np.frombuffer(footer, _LENGTH, count=1)[0])
    if footer[_LENGTH.itemsize :] != MAGIC or length > size - tail:
        raise ValueError("missing or corrupt footer")
    file.seek(size - tail - length)
    metadata = CorpusMetadata(**json.loads(file.read(length)))
    tokens = (metadata.num_train + metadata.num_validation) * np.dtype(metadata.dtype).itemsize
    if metadata.payload_bytes not in (0, tokens) or size != metadata.payload_bytes + length + tail:
        raise ValueError(f"{size} bytes, expected {metadata.payload_bytes + length + tail}")
    return metadata


def _preferred_directory(cache_dir: str | None) -> Path | None:
    """Return the configured cache directory or the user's default; None without a home directory."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    configured = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(configured):  # The XDG specification requires relative paths to be ignored.
        return Path(configured) / "meshwright"
    try:
        return Path.home() / ".cache" / "meshwright"
    except RuntimeError:
        return None


def _writable_directory(preferred: Path | None) -> Path:
    problem = "no home directory"
    if preferred is not None:
        try:
            preferred.mkdir(parents=True, exist_ok=True)
            if os.access(preferred, os.W_OK | os.X_OK):
                return preferred
            problem = f"{preferred} is not writable"
        except OSError as error:
            problem = f"cannot create {preferred} ({error.strerror})"
    fallback = _temporary_directory()
    _log.warning("%s: caching tokenised text in %s (set data.cache_dir to change this)", problem, fallback)
    return fallback


def _temporary_directory() -> Path:
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


@contextmanager
def _build_lock(path: Path) -> Iterator[None]:
    """Prevent other processes on this machine from building `path` at the same time.

    The lock saves work but is not needed for correctness: file systems without locks are fine, and a lock removed while
    another process waits for it merely lets two processes build the same file.
    """
    lock = path.with_name(f"{path.name}.lock")
    with ExitStack() as stack:
        try:
            file = stack.enter_context(lock.open("ab"))
            stack.callback(lock.unlink, missing_ok=True)
            _acquire(file, path)
        except OSError as error:
            _log.info("cannot lock %s (%s): other processes may build the same file", path, error)
        yield


def _acquire(lock: BinaryIO, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _log.info("waiting for another process to build %s", path)
        fcntl.flock(lock, fcntl.LOCK_EX)


@contextmanager
def _atomic_write(path: Path) -> Iterator[BinaryIO]:
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
            rule="tokenised text is cached in data.cache_dir (default ~/.cache/meshwright)",
            fix="free some disk space, or data.cache_dir=<a directory on another disk>",
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


def _remove_stale(directory: Path) -> None:
    """Remove temporary files more than a day old, left behind by killed processes."""
    for path in directory.glob("*.tmp"):
        try:
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()
        except OSError:
            continue
