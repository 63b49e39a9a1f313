"""Specification of a run, passed by the launcher to every rank."""

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
    """Configuration, plan and folder of a run."""

    config: RunConfig
    make_reporter: Callable[[], Reporter]
    """Picklable factory for the reporter on rank 0."""
    plan: RunPlan | None = None
    """Plan created or read by the launcher; None under another launcher, where each rank creates its own."""
    folder: RunFolder | None = None
    """Folder chosen by the launcher; None under another launcher, where rank 0 chooses it."""
    notes: tuple[str, ...] = ()
    """Lines for the reporter, such as warnings of this machine."""
    out: Path | None = None
    resume: str | None = None
