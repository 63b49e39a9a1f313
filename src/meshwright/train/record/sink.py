"""Sinks: where a run's metrics go besides `metrics.jsonl`. Their interface, and those for Weights & Biases, Trackio and
TensorBoard, whose packages are imported when a run starts."""

from __future__ import annotations

import json
import os
import secrets
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

PROJECT = "meshwright"


@dataclass(frozen=True)
class RunInfo:
    """Facts about a run for its sinks."""

    name: str
    """Name of the preset or file."""
    folder: Path
    config: Mapping[str, Any]
    """Configuration by section and key, as JSON values."""
    plan: str
    """Fingerprint of the plan."""
    layout: str
    """Mesh axes and their sizes."""
    after_step: int
    """Step that the run resumes after; 0 for a run from the beginning."""
    recorded_step: int
    """Last step that the attempt before recorded in this folder; it is repeated if it is greater than `after_step`."""


class Sink(Protocol):
    """Sink for a run's metrics, selected by `train.trackers`; it exists on rank 0 only.

    A sink may also have `image(step, name, path)`, for image files of validations, and `text(step, name, text)`, for
    the text generated at the end. Training waits for each call. A sink that raises is not called again.
    """

    @abstractmethod
    def start(self, run: RunInfo) -> None:
        """Begin a run, or go on with it after `run.after_step`."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step, by name; those that aren't finite are left out."""

    @abstractmethod
    def close(self, failed: bool) -> None:
        """End the run; `failed` if it did not complete, by an error or a request to stop."""


@contextmanager
def continue_run(run: RunInfo, file: str, new: str) -> Iterator[tuple[str, int]]:
    """Yield the name by which a tracker knows this run, and the last step that it got from earlier attempts.

    For trackers whose runs only grow. Both are stored in the run folder at the end of the block.

    Args:
        run: the run.
        file: name of a file in the run folder.
        new: name of the tracker's run, if there is none yet.
    """
    path = run.folder / file
    name, step = new, 0
    if path.exists():
        stored = json.loads(path.read_text("utf-8"))
        name, step = stored["name"], max(stored["recorded_step"], run.recorded_step)
    yield name, step
    path.write_text(json.dumps({"name": name, "recorded_step": step}) + "\n", "utf-8")


class _GrowingRun:
    """Run of a tracker whose runs only grow: steps that a resumed run repeats keep their first values.

    Its name is kept in the run folder, so that a resumed run goes on with it.
    """

    _package: Any
    _run: Any
    _recorded_step: int

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics, unless an earlier attempt has."""
        if step > self._recorded_step:
            self._run.log(dict(values), step=step)

    def image(self, step: int, name: str, path: Path) -> None:
        """Log an image, unless an earlier attempt has."""
        if step > self._recorded_step:
            self._run.log({name: self._package.Image(str(path))}, step=step)


class WandbSink(_GrowingRun):
    """Run of Weights & Biases, in the project, entity and mode of wandb's own variables, such as `WANDB_PROJECT` and
    `WANDB_MODE=offline`."""

    def start(self, run: RunInfo) -> None:
        """Start the run, or go on with it."""
        self._package = import_module("wandb")
        with continue_run(run, "wandb-run.json", secrets.token_hex(4)) as (run_id, self._recorded_step):
            self._run = self._package.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=run.folder.resolve().name,
                dir=str(run.folder),
                id=run_id,
                resume="allow",
                config={**run.config, "plan": run.plan, "layout": run.layout},
                allow_val_change=True,  # a resumed run may have another layout
                settings=self._package.Settings(console="off"),
            )

    def text(self, step: int, name: str, text: str) -> None:
        """Add a text to the run's summary."""
        self._run.summary[name] = text

    def close(self, failed: bool) -> None:
        """Upload what is left, and mark the run as finished or failed."""
        self._run.finish(exit_code=int(failed))


class TrackioSink(_GrowingRun):
    """Run of Trackio, which keeps its runs on this machine unless its own variables name a server."""

    def start(self, run: RunInfo) -> None:
        """Start the run, or go on with it."""
        self._package = import_module("trackio")
        # Trackio identifies runs by name, and run folders in two places may have the same one.
        new = f"{run.folder.resolve().name}-{secrets.token_hex(3)}"
        config = {**run.config, "plan": run.plan, "layout": run.layout}
        with continue_run(run, "trackio-run.json", new) as (name, self._recorded_step):
            self._run = self._package.init(project=PROJECT, name=name, resume="allow", config=config, embed=False)

    def close(self, failed: bool) -> None:
        """Write what is left."""
        self._run.finish()


class TensorBoardSink:
    """Events in the folder `tensorboard` of the run folder; a resumed run hides those of steps that it repeats."""

    def __init__(self) -> None:
        self._tensorboard = import_module("torch.utils.tensorboard")  # which imports torch

    def start(self, run: RunInfo) -> None:
        """Open a file of events."""
        folder = str(run.folder / "tensorboard")
        self._writer = self._tensorboard.SummaryWriter(folder, purge_step=run.after_step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a scalar per metric."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def image(self, step: int, name: str, path: Path) -> None:
        """Write an image."""
        import numpy as np
        from PIL import Image

        with Image.open(path) as image:
            self._writer.add_image(name, np.asarray(image.convert("RGB")), step, dataformats="HWC")

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text, verbatim."""
        self._writer.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()), step)

    def close(self, failed: bool) -> None:
        """Flush and close the file."""
        self._writer.close()
