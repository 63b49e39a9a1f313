"""A case of the catalogue, a model on a layout, and its outcome; the layouts, and their table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from meshwright.prove.spec import ProofSpec


class Outcome(StrEnum):
    """Outcome of a case."""

    PROVED = "proved"
    WRONG = "not proved"
    FAILED = "failed"
    """A rank raised an error."""
    REFUSED = "refused"
    """A rule refused the layout before any process started."""
    NOT_BUILT = "not built"
    """The model has no small configuration, or doesn't run by itself."""


@dataclass(frozen=True)
class Case:
    """A model on a layout, ready to be proved."""

    model: str
    layout: str
    spec: ProofSpec

    @property
    def error(self) -> Path:
        """Path of the text of an error that a rank raised."""
        return self.spec.folder / "error.txt"

    def outcome(self) -> Result:
        """Return the outcome that the processes left in the case's folder."""
        if self.error.exists():
            return Result(self.model, self.layout, Outcome.FAILED, self.error.read_text("utf-8"))
        if not self.spec.result.exists():
            return Result(self.model, self.layout, Outcome.FAILED, "the processes ended without a result")
        report = json.loads(self.spec.result.read_text("utf-8"))["report"]
        return Result.of(self, report)


@dataclass(frozen=True)
class Result:
    """Outcome of a case."""

    model: str
    layout: str
    outcome: Outcome
    reason: str = ""
    """Reason for a refusal, or the first finding or error."""

    @classmethod
    def of(cls, case: Case, report: dict[str, Any]) -> Result:
        """Return the outcome of a proof from its report."""
        passed, causes = report["passed"], [one["cause"] for one in report["causes"]]
        reason = "" if passed else next(iter([*causes, *report["evidence"]]), "the values differ")
        return cls(case.model, case.layout, Outcome.PROVED if passed else Outcome.WRONG, reason)


LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "dp_shard 2": ("mesh.dp_shard=2",),
    "pp 2": ("mesh.pp=2",),
    "tp 2": ("mesh.tp=2",),
    "all three": ("mesh.dp_shard=2", "mesh.pp=2", "mesh.tp=2"),
}
"""Keys of each layout."""
ALL = "all three"
SETTINGS = ("train.seq_len=32", "train.global_batch=8", "train.num_microbatches=2", "train.timeout_s=60")
"""Keys of every case: two micro-batches, since gradients that are reduced in every backward are right with one."""
MARKS = {Outcome.PROVED: "✓", Outcome.WRONG: "✗", Outcome.FAILED: "✗", Outcome.REFUSED: "–", Outcome.NOT_BUILT: ""}


def table(results: Iterable[Result]) -> list[str]:
    """Return the catalogue as a table in Markdown: a row a model, with the reasons of what is not proved below."""
    rows: dict[str, dict[str, Result]] = {}
    for one in results:
        rows.setdefault(one.model, {})[one.layout] = one
    layouts = [name for name in LAYOUTS if any(name in row for row in rows.values())]
    lines = [f"| model | {' | '.join(layouts)} | why not |", f"|---|{':-:|' * len(layouts)}---|"]
    for model in sorted(rows):
        row = rows[model]
        marks = [MARKS[row[name].outcome] if name in row else "" for name in layouts]
        reasons = dict.fromkeys(first_line(row[name].reason) for name in layouts if name in row and row[name].reason)
        lines.append(f"| {model} | {' | '.join(marks)} | {'; '.join(reasons)} |")
    return lines


def first_line(text: str) -> str:
    """Return the first line of a reason, without what would end a cell."""
    return text.splitlines()[0].replace("|", "/")[:160] if text else ""


def counts(results: Sequence[Result]) -> list[str]:
    """Return a line per layout: how many models are proved of those that can be built, and how many are refused."""
    lines = []
    for layout in LAYOUTS:
        found = [one.outcome for one in results if one.layout == layout]
        if found:
            built = len(found) - found.count(Outcome.NOT_BUILT)
            proved, refused = found.count(Outcome.PROVED), found.count(Outcome.REFUSED)
            wrong = f", {built - proved - refused} not" if built > proved + refused else ""
            lines.append(f"{layout}: {proved} of {built} proved, {refused} refused{wrong}")
    return lines
