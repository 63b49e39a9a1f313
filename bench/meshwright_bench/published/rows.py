"""Published training runs: the rows of `published_runs.csv`, which of them count, and which are held out.

A row counts if it states what is recomputed and a time. A third of the rows, chosen by the hash of their id, is held
out: nothing is fitted to them. Doesn't import torch.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path

FILE = Path(__file__).with_name("published_runs.csv")
UNSTATED = ("", "unknown")
DERIVED = re.compile(r"derived_step_s(?:\([^)]*\))?=([\d.]+)")
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """A published run. Numbers that its source doesn't state are None."""

    id: str
    text: dict[str, str] = field(hash=False, repr=False)
    """All columns, as written."""

    def number(self, column: str) -> int | None:
        """Return an int."""
        return int(self.text[column]) if self.text[column] else None

    def size(self, column: str) -> int:
        """Return the size of a mesh axis, which is 1 if it isn't stated."""
        return self.number(column) or 1

    @property
    def source(self) -> str:
        """Prefix of the id, by which the sources are listed."""
        return self.id.partition("-")[0]

    @property
    def is_held_out(self) -> bool:
        return int(sha256(self.id.encode()).hexdigest(), 16) % 3 == 0

    @property
    def tokens(self) -> int:
        """Tokens per step over all devices."""
        return self.size("gbs") * self.size("seq_len")

    @property
    def seconds(self) -> float | None:
        """Time of a step: as stated, else from the tokens per second, else from the stated rate of operations."""
        if self.text["step_time_s"]:
            return float(self.text["step_time_s"])
        if rate := self.text["tokens_per_s_per_gpu"]:
            return self.tokens / float(rate) / self.size("gpus")
        found = DERIVED.search(self.text["notes"])
        return float(found[1]) if found else None

    @property
    def memory_bytes(self) -> float | None:
        """Memory of the device that uses the most, if it was measured."""
        return float(self.text["memory_gib"]) * GIB if self.text["memory_gib"] else None

    @property
    def why_out(self) -> str | None:
        """Reason why the row can't judge predictions; None if it can."""
        if self.text["recompute"] in UNSTATED:
            return "recomputation isn't stated"
        if self.seconds is None:
            return "no time is stated"
        if self.text["model"].startswith("DeepSeek"):
            return "latent attention, DualPipe and multi-token prediction aren't described"
        return None


@cache
def read_rows() -> tuple[Row, ...]:
    """Return all rows in the order of the file."""
    with FILE.open(encoding="utf-8", newline="") as lines:
        return tuple(Row(one["id"], one) for one in csv.DictReader(lines))


def counting_rows() -> tuple[Row, ...]:
    """Return the rows that count."""
    return tuple(row for row in read_rows() if row.why_out is None)


def rows_to_fit() -> tuple[Row, ...]:
    """Return the rows that parameters may be fitted to: those that count and aren't held out."""
    return tuple(row for row in counting_rows() if not row.is_held_out)


def reasons_out() -> Iterator[tuple[str, int]]:
    """Yield the reasons why rows are out, with the number of rows."""
    reasons = [row.why_out for row in read_rows() if row.why_out is not None]
    for reason in dict.fromkeys(reasons):
        yield reason, reasons.count(reason)
