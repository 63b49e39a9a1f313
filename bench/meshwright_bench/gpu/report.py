"""Results of `bench/gpu`: a JSON file for each part, the summary, and a table of 80 columns. Torch-free.

They name the device, the versions and the date, and nothing else of the machine: no host, no processor, no folder.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from meshwright.units import counted, format_bytes
from meshwright_bench.gpu.cases import Record, State
from meshwright_bench.gpu.runner import Outcome

COLUMNS = 80
WIDTHS = (8, 9, 5)
"""Columns of the table before what was found: part, state, seconds."""
BYTES = "_bytes"
"""End of the names of figures that are bytes."""
DIGITS = 5
"""Significant digits of figures; further ones are noise."""


@dataclass(frozen=True)
class Machine:
    """Origin of results: device, versions and date."""

    gpu: str | None
    """Name of the GPU; None in a dry run, on the CPU."""
    versions: Mapping[str, str]
    date: str
    """ISO date."""

    @property
    def device(self) -> str:
        """Return the device's name in results."""
        return self.gpu or "CPU, dry run"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"device": self.device, "date": self.date, "versions": dict(self.versions)}


def part_json(outcome: Outcome, machine: Machine, *, hide: Mapping[str, str]) -> dict[str, Any]:
    """Return a part's results as a JSON object, its figures by `case.figure`.

    `hide` gives texts that are replaced in reasons: folders of the machine.
    """
    cases = [
        {"case": one.case, "state": one.state, "seconds": round(one.seconds, 1), "note": hidden(one.note, hide)}
        for one in outcome.records
    ]
    return {
        "part": outcome.part,
        **machine.to_json(),
        "state": outcome.state,
        "why": hidden(outcome.why, hide),
        "seconds": round(outcome.seconds, 1),
        "cases": cases,
        "figures": figures(outcome.records),
    }


def figures(records: Iterable[Record]) -> dict[str, float | None]:
    """Return the figures of all cases, by `case.figure`."""
    return {f"{one.case}.{name}": _rounded(value) for one in records for name, value in one.figures.items()}


def hidden(text: str, hide: Mapping[str, str]) -> str:
    """Return the text with each key of `hide` replaced by its value, the longest first; not the root of all folders."""
    for found in sorted((key for key in hide if len(key) > 1), key=len, reverse=True):
        text = text.replace(found, hide[found])
    return text


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object as JSON, whole or not at all."""
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", "utf-8")
    unfinished.replace(path)


def table(outcomes: Sequence[Outcome], keys: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield the lines of the table: each part's state, seconds, and cases, reason or key figures.

    `keys` has globs over the names of the figures to show, by part.
    """
    yield _row("part", "state", "s", "what was found")
    for outcome in outcomes:
        yield from rows(outcome, keys.get(outcome.part, ()))


def rows(outcome: Outcome, keys: Sequence[str] = ()) -> Iterator[str]:
    """Yield a part's lines of the table, with the figures whose names match one of `keys`."""
    first, *more = found_lines(outcome, keys)
    yield _row(outcome.part, outcome.state, f"{outcome.seconds:.0f}", first)
    yield from (_row("", "", "", line) for line in more)


def found_lines(outcome: Outcome, keys: Sequence[str]) -> Iterator[str]:
    """Yield what the table says of a part: how many cases passed, why others did not, and key figures; one at least."""
    width = COLUMNS - sum(WIDTHS) - 2 * len(WIDTHS)
    passed = [one for one in outcome.records if one.state is State.PASSED]
    texts = [f"{len(passed)} of {counted(len(outcome.records), 'case')} passed"] if passed else []
    others = [one for one in outcome.records if one.state is not State.PASSED]
    texts += [f"{one.case} {one.state}: {one.note}" for one in others]
    if outcome.why and not any(one.note and one.note in outcome.why for one in others):
        texts.insert(0, outcome.why)
    shown = figures(outcome.records).items()
    texts += [f"{name}  {_written(name, value)}" for key in keys for name, value in shown if fnmatchcase(name, key)]
    lines = [line for text in texts for line in textwrap.wrap(text, width, subsequent_indent="  ")]
    yield from lines or ["nothing"]


def _row(part: str, state: str, seconds: str, found: str) -> str:
    first, second, third = WIDTHS
    return f"{part:<{first}}  {state:<{second}}  {seconds:>{third}}  {found}".rstrip()


def _written(name: str, value: float | None) -> str:
    if value is None:
        return "unmeasured"
    if name.endswith(BYTES):
        return format_bytes(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")
