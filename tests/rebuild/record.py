"""What a run left that another checkout has to leave bit for bit, read from its folder and what it printed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.rebuild.tensors import Tensor, read_tensors

OF_THE_MACHINE = ("tokens_per_s", "memory_bytes")
"""What of a line of metrics depends on when and where the run was."""
SAMPLE = "sample\n"
"""The line before the text that a run prints at its end."""


@dataclass(frozen=True)
class Record:
    """A run that came to its end, or what it said instead."""

    steps: tuple[Mapping[str, Any], ...] = ()
    """A line of metrics each; JSON keeps floats exactly."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """Of the last checkpoint."""
    drawn: Mapping[str, str] = field(default_factory=dict)
    """The sample's text, and the hashes of pictures' files."""
    error: str = ""
    """The end of what a run that failed said."""


def read_record(out: Path, printed: str) -> Record:
    """The record of the run in `out`."""
    lines = (json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines())
    steps = tuple({key: value for key, value in line.items() if key not in OF_THE_MACHINE} for line in lines)
    drawn = {f"samples/{path.name}": _hash(path) for path in sorted(out.glob("samples/*"))}
    if SAMPLE in printed:
        drawn["sample"] = printed.rpartition(SAMPLE)[2]
    return Record(steps, read_tensors(checkpoints(out)[-1]), drawn)


def checkpoints(out: Path) -> list[Path]:
    """Of the run in `out`, the oldest first."""
    found = [path for path in (out / "checkpoints").iterdir() if path.name.isdigit()]
    return sorted(found, key=lambda path: int(path.name))


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
