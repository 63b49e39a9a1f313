"""No file of the repository names a folder of the machine it was written on."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

MACHINE_DIRS = ("work/", "root/", "tmp/venv")
"""Written without their leading slash, or this file would be a breach."""

MACHINE_PATH = re.compile(rf"(?<![\w.~}})$-])/({'|'.join(MACHINE_DIRS)})")
"""Such a folder where a path starts: `src/work/` and `$HOME/work/` are other folders."""


def path_breaches(root: Path) -> list[str]:
    """Lines of the repository's text files with a path of the build machine."""
    breaches = []
    for path in tracked_files(root):
        try:
            lines = path.read_text("utf-8").splitlines()
        except UnicodeDecodeError:  # not text
            continue
        for number, line in enumerate(lines, start=1):
            found = MACHINE_PATH.search(line)
            if found:
                breaches.append(f"{path.relative_to(root)}:{number} names {found[0]}, of one machine")
    return breaches


def tracked_files(root: Path) -> list[Path]:
    """Files that git has or would take; all files where there is no git."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        files = {path for path in root.rglob("*") if not _is_ignored(path, root)}
    else:
        files = {root / name for name in done.stdout.split("\0") if name}
    return sorted(path for path in files if path.is_file())


def _is_ignored(path: Path, root: Path) -> bool:
    parts = path.relative_to(root).parts
    return any(part.startswith(".") or part in ("__pycache__", "build", "runs") for part in parts[:-1])
