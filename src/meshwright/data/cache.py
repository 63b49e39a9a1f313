"""Files that are costly to make once and cheap to open: tokens, followed by facts about them.

    tokens | facts as JSON | length of the JSON, uint64 | magic, 8 bytes            (all little-endian)

A file is written under a temporary name, synced, and renamed as the last act, so a kill leaves no half file
under the final name, and a file whose length does not add up is made again. Of several processes on a machine
one makes the file and the others wait; where file locks do not reach, several may make it at once: they make
the same bytes, the last rename wins, and maps of an earlier one stay valid. Torch-free.
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
    """What a cache file says about a corpus.

    Args:
        dtype: element type of the tokens, little-endian (`|u1`, `<u2`, `<u4`).
        num_train: tokens to train on, which come first.
        num_validation: tokens held out.
        payload_bytes: size of the tokens in the cache file; 0 when they are kept elsewhere.
        vocab_size: the smallest vocabulary that holds every id.
        validation_text_bytes: size of the held-out text; None when unknown.
        num_skipped: files left out because they are not text.
        fingerprint: SHA-256 of the tokens (see `fingerprint.py`).
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
"""Writes the payload to a file and returns the facts about it."""


def open_or_build(name: str, *, cache_dir: str | None, build: BuildFunction) -> tuple[Path, CorpusMetadata]:
    """The cache file called `name`, made by `build` when it is missing or damaged.

    A file that is there is used even where nothing can be written. Where one has to be made and `cache_dir`
    (or `$XDG_CACHE_HOME/meshwright`, or `~/.cache/meshwright`) is not writable, a directory of this user's
    under the system's temporary one is used, with a warning in the log.

    Raises:
        DataError: the file could not be written.
    """
    preferred = _preferred_directory(cache_dir)
    if preferred is not None and (facts := load(preferred / name)) is not None:
        return preferred / name, facts
    directory = _writable_directory(preferred)
    if directory != preferred and (facts := load(directory / name)) is not None:
        return directory / name, facts
    _remove_stale(directory)
    path = directory / name
    with _build_lock(path):
        facts = load(path)
        return path, facts if facts is not None else _build_file(path, build)


def load(path: Path) -> CorpusMetadata | None:
    """The facts of a cache file; None when there is none or it is damaged."""
    try:
        with path.open("rb") as file:
            return _load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        _log.warning("the cache file %s is damaged and will be made again: %s", path, error)
        return None


def map_tokens(path: Path, facts: CorpusMetadata) -> NDArray[np.unsignedinteger]:
    """The tokens of a cache file, 1-D and memory-mapped: training tokens, then held-out ones."""
    num_tokens = facts.num_train + facts.num_validation
    return np.asarray(np.memmap(path, dtype=facts.dtype, mode="r", shape=(num_tokens,)))


def _build_file(path: Path, build: BuildFunction) -> CorpusMetadata:
    with _atomic_write(path) as file:
        facts = build(file)
        assert file.tell() == facts.payload_bytes, "a build tells its payload's size"
        encoded = json.dumps(asdict(facts)).encode("utf-8")
        file.write(encoded + np.array(len(encoded), _LENGTH).tobytes() + MAGIC)
    return facts


def _load(file: BinaryIO) -> CorpusMetadata:
    """Raises ValueError or TypeError for anything that a whole file cannot be."""
    size = os.fstat(file.fileno()).st_size
    tail = _LENGTH.itemsize + len(MAGIC)
    if size < tail:
        raise ValueError(f"{size} bytes are too few")
    file.seek(size - tail)
    footer = file.read(tail)
    length = int(np.frombuffer(footer, _LENGTH, count=1)[0])
    if footer[_LENGTH.itemsize :] != MAGIC or length > size - tail:
        raise ValueError("its end is missing")
    file.seek(size - tail - length)
    facts = CorpusMetadata(**json.loads(file.read(length)))
    tokens = (facts.num_train + facts.num_validation) * np.dtype(facts.dtype).itemsize
    if facts.payload_bytes not in (0, tokens) or size != facts.payload_bytes + length + tail:
        raise ValueError(f"it has {size} bytes where {facts.payload_bytes + length + tail} belong")
    return facts


def _preferred_directory(cache_dir: str | None) -> Path | None:
    """The configured cache directory, or the user's; None when there is no home to put one into."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    configured = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(configured):  # The XDG specification has relative paths ignored.
        return Path(configured) / "meshwright"
    try:
        return Path.home() / ".cache" / "meshwright"
    except RuntimeError:
        return None


def _writable_directory(preferred: Path | None) -> Path:
    problem = "there is no home directory"
    if preferred is not None:
        try:
            preferred.mkdir(parents=True, exist_ok=True)
            if os.access(preferred, os.W_OK | os.X_OK):
                return preferred
            problem = f"{preferred} is not writable"
        except OSError as error:
            problem = f"{preferred} cannot be made ({error.strerror})"
    fallback = _temporary_directory()
    _log.warning("%s: tokenised text is kept in %s (data.cache_dir sets another place)", problem, fallback)
    return fallback


def _temporary_directory() -> Path:
    """A directory that only this user can write to, the same for every process: /tmp is anybody's."""
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
    """Keep other processes of this machine from making `path` meanwhile.

    It saves work and nothing depends on it: a file system without locks is no error, and a lock that is
    removed while another process waits for it only lets two make the same file.
    """
    lock = path.with_name(f"{path.name}.lock")
    with ExitStack() as stack:
        try:
            file = stack.enter_context(lock.open("ab"))
            stack.callback(lock.unlink, missing_ok=True)
            _acquire(file, path)
        except OSError as error:
            _log.info("no lock on %s (%s): other processes may make the same file", path, error)
        yield


def _acquire(lock: BinaryIO, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _log.info("waiting for another process, which is making %s", path)
        fcntl.flock(lock, fcntl.LOCK_EX)


@contextmanager
def _atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file that appears at `path`, whole, when the block ends well, and not at all otherwise."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise DataError(
            f"the cache file {path} could not be written: {error.strerror or error}",
            where="data.cache_dir",
            rule="tokenised text is kept in data.cache_dir, ~/.cache/meshwright when not given",
            fix="free some space there, or data.cache_dir=<a directory on another disk>",
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


def _remove_stale(directory: Path) -> None:
    """Remove what processes that were killed more than a day ago had begun to write."""
    for path in directory.glob("*.tmp"):
        try:
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()
        except OSError:
            continue
