"""Running a layout on a side, keeping what it left, and asking a side for its predictions."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.rebuild.layouts import CORPUS, Layout
from tests.rebuild.record import Record, checkpoints, read_record
from tests.rebuild.sides import Side

PREDICT = Path(__file__).with_name("predict.py")
PRINTED, DONE = "printed.txt", "done"
TAIL = 25
"""Lines shown of what a failed run said."""


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
        out = self._place(side, json.dumps([layout.words(self.steps), _digest((self.data() / CORPUS).read_bytes())]))
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
