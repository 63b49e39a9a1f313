"""Specification of a run that the launcher passes to every rank. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshwright.config.schema import RunConfig
from meshwright.plan.run_plan import RunPlan
from meshwright.train.record.reporter import Reporter
from meshwright.train.run_folder import RunFolder


@dataclass(frozen=True)
class RunSpec:
    """A resolved run: configuration, plan and folder."""

    config: RunConfig
    make_reporter: Callable[[], Reporter]
    """Picklable factory of the reporter on rank 0."""
    plan: RunPlan | None = None
    """The plan made or read by the launcher; None under another launcher, where each rank makes it."""
    folder: RunFolder | None = None
    """The folder chosen by the launcher; None under another launcher, where rank 0 chooses it."""
    out: Path | None = None
    resume: str | None = None
