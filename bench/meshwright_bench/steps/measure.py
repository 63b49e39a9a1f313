"""Run a case with `meshwright run`, and read its steps' times and its memory from the run folder. Torch-free."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.errors import RunError
from meshwright.plan.run_plan import RunPlan
from meshwright_bench.steps.layouts import Case

WARM = 2
"""First steps of a run that don't count."""


@dataclass(frozen=True)
class MeasuredRun:
    """Times of a run's steps, and what its ranks held and spent."""

    seconds: tuple[float, ...]
    peak_bytes: int
    """Peak memory of the rank with the most."""
    parts: tuple[dict[str, float], ...] = field(default=())
    """By rank: a step's time in seconds by what it went to."""


def measure(case: Case, plan: RunPlan) -> MeasuredRun:
    """Run a case.

    Raises:
        RunError: the run failed.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "meshwright", "run", *case.words, "--out", str(out)]
        found = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if found.returncode:
            raise RunError(f"{case.name} failed", where="meshwright run", rule=found.stderr[-500:])
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]
        events = [json.loads(line) for line in (out / "events.jsonl").read_text("utf-8").splitlines()]
    measured = next(one for one in events if one["event"] == "measured")
    tokens = plan.batch.global_batch * plan.batch.tokens
    return MeasuredRun(
        seconds=tuple(tokens / one["tokens_per_s"] for one in lines[WARM:]),
        peak_bytes=max(one["peak"] for one in measured["memory"]),
        parts=tuple(measured["parts"]),
    )


def quick(seconds: Sequence[float]) -> float:
    """Return the lower quartile of steps' times: other programs only ever slow a step down."""
    return sorted(seconds)[len(seconds) // 4]
