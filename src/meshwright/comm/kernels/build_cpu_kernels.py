"""Building the C++ kernels on first use, with the system's compiler, into the user's cache.

It takes some seconds of one core, once a machine and version: the file's name has a hash of the source and of the
command. One rank builds while the others wait, and renames the file into place when it is whole. Its last 32 bytes are
the hash of the rest: to load a library that a full disk or a crash cut short can end the process (SIGBUS).
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
"""Without contraction, which would round once where the reference rounds twice; the rest is the source's own matter."""


class BuildError(Exception):
    """Why there is no library, in words for the log."""


def open_library() -> ctypes.CDLL:
    """The compiled kernels, from the cache or built now.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    command = [*_compiler(), *FLAGS]
    name = f"kernels_cpu-{_fingerprint(command)}.so"
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / name
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_whole(path):
                _build(command, path)
    except OSError as error:  # A full or read-only home: build for this process alone.
        _log.warning("the C++ kernels are built for this process alone, as %s cannot be written: %s", folder, error)
        with tempfile.TemporaryDirectory(prefix="meshwright-") as private:
            path = Path(private) / name
            _build(command, path)
            return _load(path)
    return _load(path)


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/meshwright/kernels`, or the one in `~/.cache`."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(configured) if os.path.isabs(configured) else Path(os.path.expanduser("~")) / ".cache"
    return base / "meshwright" / "kernels"


def _compiler() -> list[str]:
    """The words of `$CXX`, or the first compiler that is found."""
    configured = shlex.split(os.environ.get("CXX", ""))
    for words in [configured] if configured else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(words[0]) is not None:
            return words
    raise BuildError(f"{configured[0]} ($CXX) is not found" if configured else "no C++ compiler is found")


def _fingerprint(command: list[str]) -> str:
    parts = [SOURCE.read_text("utf-8"), platform.machine(), *command]
    return hashlib.sha256("\0".join(parts).encode("utf-8")).hexdigest()[:20]


def _build(command: list[str], path: Path) -> None:
    """Compile into a file beside `path`, and rename it."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(descriptor)
    try:
        done = subprocess.run([*command, str(SOURCE), "-o", temporary], capture_output=True, text=True)
        if done.returncode != 0:
            last = "\n".join(done.stderr.strip().splitlines()[-5:])
            raise BuildError(f"{shlex.join(command)} ended with {done.returncode}: {last}")
        with open(temporary, "ab") as file:
            file.write(_digest(Path(temporary).read_bytes()))
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _is_whole(path: Path) -> bool:
    """Whether there is a library that ends with its hash."""
    if not path.exists():
        return False
    data = path.read_bytes()
    whole = data[-32:] == _digest(data[:-32])
    if not whole:
        _log.warning("%s is damaged and will be built again", path)
    return whole


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:  # Built on another system that shares this home, say.
        raise BuildError(f"{path} cannot be loaded: {error}") from error
