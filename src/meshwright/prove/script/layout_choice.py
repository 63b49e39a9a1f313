"""Layouts of a script, as given on the command line: a number of processes and further arguments."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import InputError
from meshwright.units import counted

FOLDER, STEPS, SEED, UNIT = (
    "MESHWRIGHT_RECORD",
    "MESHWRIGHT_RECORD_STEPS",
    "MESHWRIGHT_RECORD_SEED",
    "MESHWRIGHT_RECORD_UNIT",
)
"""Environment variables that a `Recorder` reads: the folder of its record, the steps to record, and to measure what
rounding does, a seed and the relative size by which weights change."""


@dataclass(frozen=True)
class LayoutChoice:
    """Number of processes, and arguments that the script takes on this layout only."""

    text: str
    num_ranks: int
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"layout {self.text!r} ({counted(self.num_ranks, 'process')})"


@dataclass(frozen=True)
class ScriptRun:
    """A run of the script on one layout, and the folder for what its ranks record and print."""

    script: Path
    layout: LayoutChoice
    arguments: tuple[str, ...]
    """Arguments of the script on every layout."""
    num_steps: int
    folder: Path
    timeout_s: float
    perturbation: int = 0
    """Seed of the change of the initial weights by one rounding unit; 0 for none."""
    unit: float = 0.0
    """Rounding unit, if that of the forward pass is larger than that of the weights."""

    def record(self, rank: int) -> Path:
        """Return the path of a rank's record."""
        return record_path(self.folder, rank)

    def output(self, rank: int) -> Path:
        """Return the path of what a rank printed."""
        return self.folder / f"rank-{rank}.log"

    def printed(self, rank: int, *, num_lines: int = 20) -> str:
        """Return the last lines that a rank printed, or an empty string."""
        path = self.output(rank)
        lines = path.read_text("utf-8", errors="replace").rstrip().splitlines() if path.exists() else []
        return "\n".join(lines[-num_lines:])


def unit_path(folder: Path, rank: int) -> Path:
    """Return the path of the file with the rounding unit of a rank's forward pass."""
    return folder / f"rank-{rank}.unit"


def record_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's record in a run's folder."""
    return folder / f"rank-{rank}.pt"


def parse_layout(text: str) -> LayoutChoice:
    """Parse a layout such as `4 --tp 2`.

    Raises:
        InputError: the text does not begin with a number of processes.
    """
    try:
        words = shlex.split(text)
    except ValueError:
        words = []
    if not words or not words[0].isascii() or not words[0].isdigit() or int(words[0]) < 1:
        raise InputError(
            f"layout {text!r} does not begin with a number of processes",
            where="command line, --layout",
            rule="a layout is a number of processes, then arguments of the script",
            fix='--layout "4 --tp 2"',
        )
    return LayoutChoice(text, int(words[0]), tuple(words[1:]))
