"""Start the ranks of a measurement and read their result. Torch-free."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.train.launch.launcher import launch
from meshwright.train.launch.rank_context import RankContext

RawResult = dict[str, Any]
"""JSON object written by the ranks of a measurement."""


def run_measurement(
    body: Callable[[RankContext, Any], None], task: Callable[[Path], Any], *, num_ranks: int
) -> RawResult:
    """Run `body` on ranks with one thread each and return the JSON object they write.

    Args:
        body: function that each rank runs.
        task: function from the path of the result file to the argument of `body`.
        num_ranks: number of processes.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        result = Path(folder) / "result.json"
        launch(body, task(result), num_ranks=num_ranks, threads=1)
        raw: RawResult = json.loads(result.read_text("utf-8"))
    return raw


def with_rounds(task: Callable[..., Any], rounds: int | None) -> Callable[[Path], Any]:
    """Set the task's number of rounds, unless None."""
    return task if rounds is None else partial(task, rounds=rounds)
