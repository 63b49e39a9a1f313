"""Read what a run folder holds, for its report.

Only the configuration and the metrics are needed; what an earlier version or a killed run has not written is left out.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.config.load import load
from meshwright.config.overlay import flatten
from meshwright.config.source import preset_names
from meshwright.errors import MeshwrightError
from meshwright.models.contract.model_facts import unit_of_metric
from meshwright.plan.compare import hashes
from meshwright.plan.rules import read_plan
from meshwright.plan.run_plan import RunPlan
from meshwright.train.record.loss_curves import not_a_run
from meshwright.train.record.record_files import loss_key, read_events, read_metrics


@dataclass(frozen=True)
class RunData:
    """A run, as its folder tells."""

    folder: Path
    toml: str
    """Text of the configuration."""
    steps: tuple[Mapping[str, Any], ...]
    """Lines of the metrics."""
    events: tuple[Mapping[str, Any], ...]
    plan: RunPlan | None

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Configuration, keyed by dotted path."""
        return flatten(tomllib.loads(self.toml))

    @property
    def name(self) -> str:
        """Name of the preset or file."""
        return str(self.config.get("name", self.folder.name))

    @cached_property
    def loss(self) -> str:
        """Key of the loss in the metrics."""
        return loss_key(self.steps[-1] if self.steps else {})

    @property
    def unit(self) -> str:
        """Name of the loss's unit; empty if an earlier version wrote the metrics."""
        return unit_of_metric(self.loss)

    @cached_property
    def preset(self) -> Mapping[str, Any]:
        """Configuration of the preset with the run's name, keyed by dotted path; empty if there is none."""
        with suppress(MeshwrightError):
            if self.name in preset_names():
                return flatten(load(self.name).model_dump(mode="json"))
        return {}

    def series(self, key: str) -> list[tuple[float, float]]:
        """Return the steps and finite values of a metric."""
        found = ((line["step"], line.get(key)) for line in self.steps)
        return [(step, value) for step, value in found if isinstance(value, int | float)]

    def last_event(self, kind: str) -> Mapping[str, Any] | None:
        """Return the last event of a kind, of any attempt."""
        return next(reversed(self.all_events(kind)), None)

    def all_events(self, kind: str) -> list[Mapping[str, Any]]:
        """Return the events of a kind, in order."""
        return [event for event in self.events if event["event"] == kind]

    @cached_property
    def measured(self) -> Mapping[str, Any] | None:
        """Last measurement, unless the run has gone on with another plan since."""
        found = self.last_event("measured")
        is_of_plan = found is None or self.plan is None or found["plan"] == hashes(self.plan).fingerprint
        return found if is_of_plan else None

    @property
    def device(self) -> str:
        """Device that ranks ran on last: `cpu`, or the CUDA name of a GPU; empty if it isn't known."""
        return str((self.last_event("start") or {}).get("device", ""))

    @property
    def end(self) -> Mapping[str, Any] | None:
        """Event that ended the last attempt; None if it runs, or was killed."""
        attempt = [event for event in self.events if event["event"] in ("start", "end")]
        return attempt[-1] if attempt and attempt[-1]["event"] == "end" else None

    def logs(self) -> Iterator[tuple[str, str]]:
        """Yield name and text of each rank's log file."""
        for path in sorted((self.folder / "logs").glob("rank-*.log"), key=lambda path: (len(path.name), path.name)):
            with suppress(OSError):
                yield path.name, path.read_text("utf-8", errors="replace")


def read_run(folder: Path) -> RunData:
    """Read a run folder.

    Raises:
        InputError: the folder is not a run folder, or its metrics are damaged.
    """
    try:
        toml = (folder / "config.toml").read_text("utf-8")
        tomllib.loads(toml)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise not_a_run(folder, f"no readable config.toml ({why})") from None
    metrics, plan = folder / "metrics.jsonl", None
    with suppress(MeshwrightError):
        plan = read_plan(folder / "plan.json") if (folder / "plan.json").is_file() else None
    lines = tuple(read_metrics(metrics)) if metrics.exists() else ()
    return RunData(folder, toml, lines, tuple(read_events(folder)), plan)
