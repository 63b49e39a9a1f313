"""No file of the repository names a folder of the machine it was written on."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path


def machine_folders(root: Path) -> set[Path]:
    """Folders that another machine has not, or not for this: where the repository is, its Python, and one's home.

    A virtual environment only: the system's Python is in a folder that every machine has.
    """
    root = root.resolve()
    everywhere = {Path("/"), Path(tempfile.gettempdir()).resolve()}
    own_python = {Path(sys.prefix)} if sys.prefix != sys.base_prefix else set()
    return ({root, root.parent, Path.home()} | own_python) - everywhere


def path_breaches(root: Path) -> list[str]:
    """Lines of the repository's text files with a path of the machine that the test runs on."""
    names = "|".join(re.escape(str(folder)) for folder in sorted(machine_folders(root), reverse=True))
    # The start of a path, in whole names: in the middle of another, or with its last name going on, it is another.
    machine_path = re.compile(rf"(?<![\w.~}})$-])({names})(?![\w-])")
    breaches = []
    for path in tracked_files(root):
        try:
            lines = path.read_text("utf-8").splitlines()
        except UnicodeDecodeError:  # not text
            continue
        for number, line in enumerate(lines, start=1):
            found = machine_path.search(line)
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
