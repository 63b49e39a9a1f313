"""Interface of a sink: where a run's metrics go besides `metrics.jsonl`."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


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
