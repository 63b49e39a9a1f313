"""Layouts of a script, as given on the command line: a number of processes and further arguments."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import InputError
from meshwright.units import counted

FOLDER, STEPS = "MESHWRIGHT_RECORD", "MESHWRIGHT_RECORD_STEPS"
SEED, REFERENCE = "MESHWRIGHT_RECORD_SEED", "MESHWRIGHT_RECORD_REFERENCE"
"""Environment variables that a `Recorder` reads: the folder of its record, the steps to record, and to measure what
rounding does, the seed of a change of the weights and the folder of the reference's records, which tell the unit."""


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
    reference: Path = Path()
    """Folder of the run that is changed."""

    @property
    def command(self) -> list[str]:
        """The script and its arguments."""
        return [str(self.script), *self.arguments, *self.layout.arguments]

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
