"""Build the C++ kernels on first use with the system compiler, and cache them per user.

The build takes a few seconds on one core, once per machine and version: the file name contains a hash of the source and
the command. One rank builds while the others wait, and renames the finished file into place. The last 32 bytes are a
hash of the rest, because loading a library truncated by a full disk or a crash can kill the process (SIGBUS).
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from meshwright.log import get_logger

_log = get_logger(__name__)

SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off")
"""Compiler flags, without contraction: a fused multiply-add rounds once where the reference rounds twice."""


class BuildError(Exception):
    """Failure to build or load the library, with a message for the log."""


def open_library() -> ctypes.CDLL:
    """Load the compiled kernels from the cache, building them if needed.

    Raises:
        BuildError: no compiler was found, or the library could not be built or loaded.
    """
    command = [*_compiler(), *FLAGS]
    name = f"kernels_cpu-{_fingerprint(command)}.so"
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / name
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_complete(path):
                _build(command, path)
    except OSError as error:  # The disk is full or the home directory read-only.
        _log.warning("building the C++ kernels for this process only, as %s cannot be written: %s", folder, error)
        with tempfile.TemporaryDirectory(prefix="meshwright-") as private:
            path = Path(private) / name
            _build(command, path)
            return _load(path)
    return _load(path)


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/meshwright/kernels`, by default in `~/.cache`."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(configured) if os.path.isabs(configured) else Path(os.path.expanduser("~")) / ".cache"
    return base / "meshwright" / "kernels"


def _compiler() -> list[str]:
    """Return the command in `$CXX`, or the first compiler found."""
    configured = shlex.split(os.environ.get("CXX", ""))
    for words in [configured] if configured else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(words[0]) is not None:
            return words
    raise BuildError(f"{configured[0]} ($CXX) was not found" if configured else "no C++ compiler was found")


def _fingerprint(command: list[str]) -> str:
    parts = [SOURCE.read_text("utf-8"), platform.machine(), *command]
    return hashlib.sha256("\0".join(parts).encode("utf-8")).hexdigest()[:20]


def _build(command: list[str], path: Path) -> None:
    """Compile into a temporary file in the same directory, and rename it to `path`."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(descriptor)
    try:
        done = subprocess.run([*command, str(SOURCE), "-o", temporary], capture_output=True, text=True)
        if done.returncode != 0:
            last = "\n".join(done.stderr.strip().splitlines()[-5:])
            raise BuildError(f"{shlex.join(command)} failed with exit code {done.returncode}: {last}")
        with open(temporary, "ab") as file:
            file.write(_digest(Path(temporary).read_bytes()))
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _is_complete(path: Path) -> bool:
    """Return whether the library exists and ends with its hash."""
    if not path.exists():
        return False
    data = path.read_bytes()
    complete = data[-32:] == _digest(data[:-32])
    if not complete:
        _log.warning("%s is damaged and will be rebuilt", path)
    return complete


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:  # For example, built on another system that shares this home.
        raise BuildError(f"{path} cannot be loaded: {error}") from error
