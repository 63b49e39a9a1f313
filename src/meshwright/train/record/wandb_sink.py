"""Sink for Weights & Biases.

The project, entity and mode are those of wandb's own variables, such as `WANDB_PROJECT` and `WANDB_MODE=offline`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from meshwright.train.record.sink import RunInfo, continue_run


class WandbSink:
    """Run of Weights & Biases, whose id is kept in the run folder, so that a resumed run goes on with it.

    A run of Weights & Biases only grows: steps that a resumed run repeats keep their first values.
    """

    def start(self, run: RunInfo) -> None:
        """Start the run, or go on with it."""
        self._wandb: Any = import_module("wandb")
        with continue_run(run, "wandb-run.json", secrets.token_hex(4)) as (run_id, self._recorded_step):
            self._run = self._wandb.init(
                project=os.environ.get("WANDB_PROJECT", "meshwright"),
                name=run.folder.resolve().name,
                dir=str(run.folder),
                id=run_id,
                resume="allow",
                config={**run.config, "plan": run.plan, "layout": run.layout},
                allow_val_change=True,  # a resumed run may have another layout
                settings=self._wandb.Settings(console="off"),
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics, unless an earlier attempt has."""
        if step > self._recorded_step:
            self._run.log(dict(values), step=step)

    def image(self, step: int, name: str, path: Path) -> None:
        """Log an image, unless an earlier attempt has."""
        if step > self._recorded_step:
            self._run.log({name: self._wandb.Image(str(path))}, step=step)

    def text(self, step: int, name: str, text: str) -> None:
        """Add a text to the run's summary."""
        self._run.summary[name] = text

    def close(self, failed: bool) -> None:
        """Upload what is left, and mark the run as finished or failed."""
        self._run.finish(exit_code=int(failed))
