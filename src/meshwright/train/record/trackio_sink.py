"""Sink for Trackio, which keeps its runs on this machine unless its own variables name a server."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from meshwright.train.record.sink import RunInfo, continue_run

PROJECT = "meshwright"


class TrackioSink:
    """Run of Trackio, whose name is kept in the run folder, so that a resumed run goes on with it.

    A run of Trackio only grows: steps that a resumed run repeats keep their first values.
    """

    def start(self, run: RunInfo) -> None:
        """Start the run, or go on with it."""
        self._trackio: Any = import_module("trackio")
        # Trackio identifies runs by name, and run folders in two places may have the same one.
        new = f"{run.folder.resolve().name}-{secrets.token_hex(3)}"
        config = {**run.config, "plan": run.plan, "layout": run.layout}
        with continue_run(run, "trackio-run.json", new) as (name, self._recorded_step):
            self._run = self._trackio.init(project=PROJECT, name=name, resume="allow", config=config, embed=False)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics, unless an earlier attempt has."""
        if step > self._recorded_step:
            self._run.log(dict(values), step=step)

    def image(self, step: int, name: str, path: Path) -> None:
        """Log an image, unless an earlier attempt has."""
        if step > self._recorded_step:
            self._run.log({name: self._trackio.Image(str(path))}, step=step)

    def close(self, failed: bool) -> None:
        """Write what is left."""
        self._run.finish()
