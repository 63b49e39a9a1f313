"""A side: a checkout, given by its path or as a revision; running a layout on it, and asking it for its predictions."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.rebuild.layouts import Layout
from tests.rebuild.record import Record, checkpoints, read_record

ROOT = Path(__file__).resolve().parents[2]
DROPPED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "COLUMNS")
"""What a launcher or a terminal may have left in the environment."""
LIMIT_S = 600.0
PREDICT = Path(__file__).with_name("predict.py")
PRINTED, DONE = "printed.txt", "done"
TAIL = 25
"""Lines shown of what a failed run said."""


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


@dataclass(frozen=True)
class Workshop:
    """Where runs go, and how long they are.

    Runs of a revision that is named by its commit are found again here; all else is made anew.
    """

    folder: Path
    steps: int

    def data(self) -> Path:
        """The folder of what runs read."""
        return self.folder / "data"

    def train(self, side: Side, layout: Layout) -> tuple[Record, Path]:
        """The layout's run on a side, made now or found, and its folder."""
        data = b"".join(path.read_bytes() for path in layout.data_files(self.data()))
        out = self._place(side, json.dumps([layout.words(self.steps), _digest(data)]))
        out = out.with_name(f"{layout.name}-{out.name}")
        return self._run(side, layout, out, []), out

    def go_on(self, side: Side, layout: Layout, earlier: Path) -> Record:
        """The run on a side that goes on from the first checkpoint of another's run."""
        out = self.folder / side.name / f"{layout.name}-resumed"
        return self._run(side, layout, out, ["--resume", str(checkpoints(earlier)[0])])

    def predict(self, side: Side, lines: Sequence[Sequence[str]]) -> dict[str, Any]:
        """What a side predicts of each command line: the answer of `predict`, or `error`."""
        text = json.dumps(list(map(list, lines)))
        kept = self._place(side, text + PREDICT.read_text("utf-8")).with_suffix(".json")
        if side.commit and kept.is_file():
            return dict(json.loads(kept.read_text("utf-8")))
        kept.parent.mkdir(parents=True, exist_ok=True)
        done = side.run([str(PREDICT)], cwd=self.folder, text=text)
        if done.returncode:
            return {"error": _tail(done.stderr)}
        found = json.loads(done.stdout)
        if not Path(found["package"]).is_relative_to(side.root):
            return {"error": f"meshwright came from {found['package']}, not from {side.root}"}
        kept.write_text(done.stdout, "utf-8")
        return dict(found)

    def _run(self, side: Side, layout: Layout, out: Path, more: list[str]) -> Record:
        if not (side.commit and (out / DONE).exists() and not more):
            shutil.rmtree(out, ignore_errors=True)
            words = [*layout.words(self.steps), *layout.data_words(self.data(), self.folder / side.name / "cache")]
            done = side.run(["-m", "meshwright", "run", *words, "--out", str(out), *more], cwd=self.folder)
            if done.returncode:
                return Record(error=_tail(done.stderr or done.stdout))
            (out / PRINTED).write_text(done.stdout, "utf-8")
            (out / DONE).touch()
        try:
            return read_record(out, (out / PRINTED).read_text("utf-8"))
        except (OSError, ValueError, KeyError, IndexError) as error:
            return Record(error=f"what the run left can't be read: {error!r}")

    def _place(self, side: Side, what: str) -> Path:
        """Where a side's result is kept: by its commit, and by all that decides it."""
        owner = f"kept-{side.commit[:12]}" if side.commit else side.name
        return self.folder / owner / _digest(f"{what} {sys.version} {_torch_version()}".encode())[:12]


def _torch_version() -> str:
    from importlib.metadata import version

    return version("torch")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _tail(text: str) -> str:
    return "\n".join(text.rstrip().splitlines()[-TAIL:]) or "it said nothing"
