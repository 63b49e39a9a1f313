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
SCRIPT = "python - <<'END'\n"
STARTS = (
    "meshwright ",
    "export ",
    "make ",
    "python ",
    "python3 ",
    "torchrun ",
    "srun ",
    "hf ",
    "lm_eval ",
    "accelerate ",
)
"""What commands begin with."""
PATTERN = re.compile(r" \[|…")
"""What stands for other words: the line is no command as it is."""
NUMBER = re.compile(r"[+-]?\d[\d.,:]*(?:e-?\d+)?(?: ?(?:[kMGT]i?B|[kMBT]|B|s|%)\b)?")


class Shown(NamedTuple):
    """A command of a page, and what the page says that it prints."""

    page: str
    command: str
    lines: tuple[str, ...]


def fences(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the language and the text of each code block of a page."""
    for indent, language, text in re.findall(r"^( *)```([^\n]*)\n(.*?)^\1```", page.read_text("utf-8"), re.M | re.S):
        yield language, re.sub(rf"^{indent}", "", text, flags=re.M)


def commands_of(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the commands of a block, with the lines that it shows after each; none if it is output or a pattern.

    They begin with `$`, or are all of the block. Lines that end in a backslash are joined, and a script is one command.
    """
    text = re.sub(r"\\\n\s*", "", text)
    if text.startswith("$ "):
        for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
            command, _, output = part.partition("\n")
            yield command, tuple(output.rstrip().splitlines())
    elif text.startswith(SCRIPT):
        yield text.removesuffix("END\n"), ()
    elif text.startswith(STARTS):
        yield from ((line, ()) for line in text.splitlines() if line and not PATTERN.search(line))


def shown() -> Iterator[Shown]:
    """Yield the commands that begin with `$` on all pages."""
    for page in PAGES:
        for _, text in fences(page):
            if text.startswith("$ "):
                yield from (Shown(page.name, *found) for found in commands_of(text))


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
