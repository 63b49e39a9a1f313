"""What every rank of a run is told. Torch-free: the launcher makes it."""

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
    """A run, resolved."""

    config: RunConfig
    make_reporter: Callable[[], Reporter]
    """Makes the reporter on rank 0; picklable."""
    plan: RunPlan | None = None
    """What the launcher made, or read; None where each rank makes it, as another launcher started the ranks."""
    folder: RunFolder | None = None
    """Decided by the launcher; None when rank 0 decides because another launcher started the ranks."""
    out: Path | None = None
    resume: str | None = None
