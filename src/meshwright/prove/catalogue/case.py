"""A case of the catalogue, a model on a layout, and its outcome. Doesn't import torch."""

from __future__ import annotations

import json
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
