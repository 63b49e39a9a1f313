"""Outcomes of a catalogue as a file, with the versions that they are of. Doesn't import torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from meshwright.errors import DataError
from meshwright.prove.catalogue.case import Result, counts, first_line, table

PACKAGES = ("transformers", "torch")


@dataclass(frozen=True)
class Report:
    """Outcomes, with the versions of what was proved."""

    versions: dict[str, str]
    results: tuple[Result, ...]


def to_json(results: Iterable[Result]) -> str:
    """Return outcomes as JSON, each with the first line of its reason."""
    short = [Result(one.model, one.layout, one.outcome, first_line(one.reason)) for one in results]
    return json.dumps(asdict(Report({name: version(name) for name in PACKAGES}, tuple(short))), indent=1)


def read_report(path: Path) -> Report:
    """Return the outcomes in a file that `meshwright prove --catalogue --json` wrote.

    Raises:
        DataError: the file can't be read, or is no such file.
    """
    try:
        return TypeAdapter(Report).validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise DataError(
            f"{path} has no outcomes of a catalogue: {str(error).splitlines()[0]}",
            where=str(path),
            rule="the file is what meshwright prove --catalogue --json writes",
            fix=f"meshwright prove --catalogue --json {path}",
        ) from error


def page(report: Report) -> str:
    """Return outcomes as a page in Markdown: how many are proved on each layout, and a table with the reasons."""
    versions = ", ".join(f"{name} {found}" for name, found in report.versions.items())
    lines = [
        "# The catalogue",
        "",
        "Written by `meshwright draw catalogue docs/catalogue.json --table docs/catalogue.md`, from what",
        f"`meshwright prove --catalogue --json docs/catalogue.json` found with {versions}:",
        "losses, gradients and parameters of two steps with two micro-batches, equal to those of one process to 1e-12.",
        "A layout is proved (✓), refused before a process starts (–), or not proved (✗); an empty cell was not run.",
        "",
        *(f"- {line}" for line in counts(report.results)),
        "",
        *table(report.results),
    ]
    return "\n".join(lines) + "\n"
