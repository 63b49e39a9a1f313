"""Directory of what is costly to make again: tokenised text, packed documents, and what is known of foreign models.

Torch-free, and numpy-free: plans look into it.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from meshwright.log import get_logger

_log = get_logger(__name__)


def preferred_directory(cache_dir: str | None) -> Path | None:
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
