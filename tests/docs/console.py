"""Console blocks of the documentation: commands, and the output that the page shows for them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from meshwright.cli.main import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NUMBER = re.compile(r"[+-]?\d[\d.,:]*(?:e-?\d+)?(?: ?(?:[kMGT]i?B|[kMBT]|B|s|%)\b)?")


class Shown(NamedTuple):
    """A command of a page, and what the page says that it prints."""

    page: str
    command: str
    lines: tuple[str, ...]


def shown() -> Iterator[Shown]:
    """Yield the commands that begin with `$` in code blocks, with the lines up to the next one."""
    for page in PAGES:
        for block in re.findall(r"^```\n(\$ .*?)^```", page.read_text("utf-8"), re.M | re.S):
            for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
                command, _, output = re.sub(r"\\\n\s*", "", part).partition("\n")
                yield Shown(page.name, command, tuple(output.rstrip().splitlines()))


def run_here(*words: str) -> None:
    """Run the command in this process; it succeeds."""
    with mock.patch.object(sys, "argv", ["meshwright", *words]):
        try:
            main()
        except SystemExit as ended:
            assert not ended.code, words


def missing(expected: Sequence[str], found: str, *, numbers: bool) -> list[str]:
    """Return the expected lines that are not among those found, in order; `…` stands for what is left out.

    Args:
        expected: the lines of a page.
        found: the output of the command.
        numbers: whether numbers must be the same, and not only where they are.
    """
    lines, at, lost = [line if numbers else NUMBER.sub("#", line) for line in found.splitlines()], 0, []
    for line in expected:
        if line.strip() == "…":
            continue
        wanted = re.escape(line.rstrip() if numbers else NUMBER.sub("#", line.rstrip())).replace("…", ".*")
        place = next((i for i in range(at, len(lines)) if re.fullmatch(wanted, lines[i].rstrip())), None)
        if place is None:
            lost.append(line)
        else:
            at = place + 1
    return lost
