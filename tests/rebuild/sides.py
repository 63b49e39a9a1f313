"""A side: a checkout, given by its path or as a revision, and the commands that run in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DROPPED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "COLUMNS")
"""What a launcher or a terminal may have left in the environment."""
LIMIT_S = 600.0


class NoSuchSide(Exception):
    """What was given is neither a checkout nor a revision."""


@dataclass(frozen=True)
class Side:
    """One of the two that are compared."""

    name: str
    """OLD or NEW."""
    root: Path
    commit: str = ""
    """Of a revision; none of a checkout, whose files may be any."""

    def run(self, arguments: Sequence[str], *, cwd: Path, text: str = "") -> subprocess.CompletedProcess[str]:
        """Run Python in this side's environment, in a session of its own that ends with it.

        Where the checkout is not there, before or after, it is a failure: an installed package would have run instead.
        """
        if not self._is_there():
            return self._gone(arguments)
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=cwd,
            env=self._environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(text, timeout=LIMIT_S)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            errors += f"\nended after {LIMIT_S:g} s"
        if not self._is_there():
            return self._gone(arguments)
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def _is_there(self) -> bool:
        return (self.root / "src" / "meshwright" / "__init__.py").is_file()

    def _gone(self, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(arguments, 1, "", f"the checkout {self.root} of {self.name} is gone")

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in DROPPED and name[:6] != "SLURM_"}
        paths = os.pathsep.join(str(self.root / name) for name in ("src", "bench"))  # each with its own benchmarks
        return kept | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}


@contextmanager
def open_side(name: str, given: str, scratch: Path) -> Iterator[Side]:
    """The side that `given` names; the worktree of a revision is there until the end.

    Raises:
        NoSuchSide: `given` is neither a checkout nor a revision.
    """
    path = Path(given)
    if (path / "src" / "meshwright").is_dir():
        yield Side(name, path.resolve())
        return
    found = _git("rev-parse", "--verify", "--quiet", f"{given}^{{commit}}")
    if found.returncode:
        raise NoSuchSide(f"{name}: {given} is neither a checkout with src/meshwright nor a revision of {ROOT}")
    tree, commit = scratch / f"tree-{name}", found.stdout.strip()
    added = _git("worktree", "add", "--detach", "--lock", "--reason", "being compared", str(tree), commit)
    if added.returncode:
        raise NoSuchSide(f"{name}: no worktree of {given}: {added.stderr}")
    try:
        yield Side(name, tree, commit)
    finally:
        _git("worktree", "remove", "--force", "--force", str(tree))  # twice, as it is locked


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
