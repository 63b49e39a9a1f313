"""The command, as the package's docstring describes it: a line for each layout."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

import tests.rebuild
from tests.rebuild.differences import prediction_differences, record_differences, step_differences, tensor_differences
from tests.rebuild.layouts import LAYOUTS, Layout, chosen, grid, write_data
from tests.rebuild.record import Record
from tests.rebuild.sides import NoSuchSide, Side, Workshop, open_side

T, U = TypeVar("T"), TypeVar("U")

GRID = "grid"
"""The name, for `--only`, of the predictions of big layouts."""
WIDTH = max(len(layout.name) for layout in LAYOUTS)
MORE_SHOWN = 4
"""Differences shown after the first."""


@dataclass(frozen=True)
class Comparison:
    """Both sides, and what they are compared in."""

    old: Side
    new: Side
    workshop: Workshop
    new_words: list[str]
    jobs: int

    def layout(self, layout: Layout) -> tuple[list[str], str]:
        """What differs in a layout, the first first; and what was compared."""
        theirs = layout.changed(self.new_words)
        (old, folder), (new, _) = self._on_both(self.workshop.train, layout, theirs)
        found, compared = list(record_differences(old, new)), f"{len(old.steps)} steps · {len(old.tensors)} tensors"
        if layout.resumes and not old.error:
            found += (f"NEW went on from OLD's checkpoint: {one}" for one in self._resumed(theirs, old, folder))
            compared += " · goes on from OLD's checkpoint"
        return found, compared

    def _on_both(self, task: Callable[[Side, T], U], ours: T, theirs: T) -> tuple[U, U]:
        with ThreadPoolExecutor(self.jobs) as pool:
            first, second = pool.submit(task, self.old, ours), pool.submit(task, self.new, theirs)
            return first.result(), second.result()

    def _resumed(self, layout: Layout, old: Record, folder: Path) -> Iterator[str]:
        record = self.workshop.go_on(self.new, layout, folder)
        if record.error:
            yield record.error
            return
        half = self.workshop.steps // 2
        yield from step_differences(old.steps[half:], record.steps[-(self.workshop.steps - half) :])
        yield from tensor_differences(old.tensors, record.tensors)

    def predictions(self, lines: dict[str, list[str]]) -> tuple[list[str], str]:
        """What differs in the predictions of command lines, by name; and what was compared."""
        changed = [[*line, *self.new_words] for line in lines.values()]
        old, new = self._on_both(self.workshop.predict, list(lines.values()), changed)
        errors = [f"{name} failed:\n{side['error']}" for name, side in (("OLD", old), ("NEW", new)) if "error" in side]
        if errors:
            return errors, ""
        totals_only = old["way"] != new["way"]
        found = [
            f"{name}: {one}"
            for name, ours, theirs in zip(lines, old["figures"], new["figures"], strict=True)
            for one in prediction_differences(ours, theirs, totals_only=totals_only)
        ]
        refused = sum("refused" in figures for figures in old["figures"])
        return found, f"predictions of {len(lines) - refused} layouts ({old['way']}, {new['way']}) · {refused} refused"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 nothing differs, 1 something does, 2 bad arguments."""
    given = _parser().parse_args(arguments)
    layouts = list(chosen(given.only, fast=given.fast))
    with_grid = any(fnmatchcase(GRID, glob) for glob in given.only)
    if given.list:
        for layout in layouts:
            marks = ", ".join(mark for mark, on in (("fast", layout.fast), ("resumes", layout.resumes)) if on)
            _say(f"{layout.name:{WIDTH}}  {layout.preset} {layout.layout}{f'  ({marks})' if marks else ''}")
        return 0
    if not layouts and not with_grid:
        _say(f"--only {' '.join(given.only)} fits no layout; --list names them")
        return 2
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # worktrees are removed then too
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compare-")))
        folder = (given.keep or scratch / "runs").resolve()
        write_data(folder / "data", layouts)
        try:
            old = stack.enter_context(open_side("OLD", given.old, scratch))
            new = stack.enter_context(open_side("NEW", given.new, scratch))
        except NoSuchSide as error:
            _say(str(error))
            return 2
        comparison = Comparison(old, new, Workshop(folder, given.steps), given.new_word, given.jobs)
        return _compare_all(comparison, layouts, with_grid=with_grid)


def _compare_all(comparison: Comparison, layouts: list[Layout], *, with_grid: bool) -> int:
    started, num_differing = time.monotonic(), 0
    small = {layout.name: layout.words(comparison.workshop.steps) for layout in layouts}
    big = dict(grid()) if with_grid else {}
    tasks = [("predictions", lambda: comparison.predictions({**small, **big}))]
    tasks += [(layout.name, lambda layout=layout: comparison.layout(layout)) for layout in layouts]
    for name, task in tasks:
        begun = time.monotonic()
        found, compared = task()
        num_differing += bool(found)
        took = f"{time.monotonic() - begun:.1f} s"
        _say(f"{'DIFFERS' if found else 'equal  '}  {name:{WIDTH}}  {found[0] if found else compared}  ({took})")
        for one in found[1 : 1 + MORE_SHOWN]:
            _say(f"{'':{9 + WIDTH}}  {one}")
        if len(found) > 1 + MORE_SHOWN:
            _say(f"{'':{9 + WIDTH}}  … and {len(found) - 1 - MORE_SHOWN} more")
    verdict = f"{num_differing} of {len(tasks)} differ" if num_differing else f"all {len(tasks)} equal"
    _say(f"{verdict} in {time.monotonic() - started:.0f} s")
    return 1 if num_differing else 0


def _say(text: str) -> None:
    print(text, flush=True)


def _steps(word: str) -> int:
    steps = int(word)
    if steps < 4 or steps % 2:
        raise argparse.ArgumentTypeError("an even number from 4: there is a checkpoint in the middle")
    return steps


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.rebuild.compare",
        description=tests.rebuild.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for side in ("old", "new"):
        parser.add_argument(side, metavar=side.upper(), help="path of a checkout, or a revision of this repository")
    parser.add_argument(
        "--only", nargs="+", default=["*"], metavar="GLOB", help=f"layouts by name; {GRID} is the big predictions"
    )
    parser.add_argument("--fast", action="store_true", help="few layouts, which cover the pairs")
    parser.add_argument("--steps", type=_steps, default=10, help="of each run")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep runs there; a revision's are not made again")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=2, help="1: one side after the other")
    parser.add_argument("--new-word", action="append", default=[], metavar="KEY=VALUE", help="one more word for NEW")
    parser.add_argument("--list", action="store_true", help="print the layouts and run nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
