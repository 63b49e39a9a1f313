"""Starting the ranks of a measurement and reading what they wrote. Torch-free."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.train.launch.launcher import launch
from meshwright.train.launch.rank_context import RankContext

Answer = dict[str, Any]
"""What the ranks of a measurement wrote."""


def measured(body: Callable[[RankContext, Any], None], task: Callable[[Path], Any], *, num_ranks: int) -> Answer:
    """The JSON object that `body`, on ranks of one thread each, wrote where its task says.

    Args:
        body: what each rank runs.
        task: from the file for the result to the body's argument.
        num_ranks: processes to start.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        result = Path(folder) / "result.json"
        launch(body, task(result), num_ranks=num_ranks, threads=1)
        answer: Answer = json.loads(result.read_text("utf-8"))
    return answer


def with_rounds(task: Callable[..., Any], rounds: int | None) -> Callable[[Path], Any]:
    """The task, with this many rounds or its own number."""
    return task if rounds is None else partial(task, rounds=rounds)
