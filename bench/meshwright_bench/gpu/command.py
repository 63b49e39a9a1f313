"""The command `bench/gpu`: run the parts in their order within a time limit, and show what each left."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from meshwright_bench.gpu.cases import CaseError, State
from meshwright_bench.gpu.parts import PARTS, Part
from meshwright_bench.gpu.report import COLUMNS, Machine, hidden, part_json, rows, table, write_json
from meshwright_bench.gpu.runner import Outcome, last_line, run_part

ROOT = Path(__file__).parents[3]
OUT, DRY_OUT = ROOT / "bench" / "results" / "gpu", ROOT / "build" / "gpu-dry"
PROCESS = "meshwright_bench.gpu.part_process"
LOGS, SUMMARY = "logs", "summary.json"
LEAST_S = 5.0
"""A part that has less time left is not started."""
NAMES = tuple(part.name for part in PARTS)


@dataclass(frozen=True)
class Call:
    """Arguments and folders of a call."""

    out: Path
    """Folder of the results."""
    is_dry: bool
    limit_s: float
    """Seconds that all parts may take."""
    scratch: Path
    """Folder that the parts share; removed at the end."""
    begin: float
    """Time by `time.monotonic`."""

    def left_s(self) -> float:
        """Return the seconds that are left."""
        return self.begin + self.limit_s - time.monotonic()


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 1 if a part failed or was cut off, 2 if nothing could start."""
    given = _parser().parse_args(words)
    if given.list:
        for part in PARTS:
            print(f"{part.name:<8}  {part.title} (at most {part.limit_s:.0f} s)")
        return 0
    chosen = given.parts or NAMES
    parts = tuple(part for part in PARTS if part.name in chosen)
    out = given.out or (DRY_OUT if given.dry else OUT)
    with _terminated(), tempfile.TemporaryDirectory(prefix="meshwright-gpu-") as folder:
        call = Call(out.absolute(), given.dry, 60 * given.limit_minutes, Path(folder), time.monotonic())
        try:
            machine = identify(call)
            (call.out / LOGS).mkdir(parents=True, exist_ok=True)
        except CaseError as error:
            for line in str(error).splitlines():
                print(textwrap.fill(line, COLUMNS, subsequent_indent=" " * 7), file=sys.stderr)
            return 2
        except OSError as error:
            print(f"error  can't write {call.out}: {error.strerror}\nfix    --out DIR", file=sys.stderr)
            return 2
        print(f"{machine.device} · {machine.date}")
        versions = " · ".join(f"{name} {version}" for name, version in machine.versions.items())
        print(textwrap.fill(versions, COLUMNS), flush=True)
        return run_parts(parts, call, machine)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench/gpu",
        description="Everything that a GPU must show, most valuable part first, each with its own time limit.",
    )
    parser.add_argument("--dry", action="store_true", help="run the smallest case of each part on the CPU")
    parser.add_argument("--out", type=Path, metavar="DIR", help="results (bench/results/gpu; dry: build/gpu-dry)")
    parser.add_argument("--parts", type=_names, metavar="A,B", help="only these, in their order; --list has them")
    parser.add_argument("--limit-minutes", type=_minutes, default=8.0, metavar="N", help="of all parts (8)")
    parser.add_argument("--list", action="store_true", help="list the parts, and run none")
    return parser


def _names(text: str) -> tuple[str, ...]:
    """Return the names of parts in a list.

    Raises:
        ArgumentTypeError: a name is unknown.
    """
    names = tuple(name.strip() for name in text.split(","))
    if unknown := [name for name in names if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is not a part; --list has them")
    return names


def _minutes(text: str) -> float:
    """Return a positive number of minutes.

    Raises:
        ArgumentTypeError: it is none.
    """
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of minutes, such as 8")
    return minutes


@contextmanager
def _terminated() -> Iterator[None]:
    """Have SIGTERM end the command as Ctrl-C does, so that nothing goes on without it."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def identify(call: Call) -> Machine:
    """Return the device and the versions that the parts will use.

    Raises:
        CaseError: Python can't start them, or there is no CUDA device; with a fix.
    """
    result, log = call.scratch / "machine.json", call.scratch / "machine.log"
    command = [sys.executable, "-m", PROCESS, "--identify", str(result), *(["--on-cpu"] if call.is_dry else [])]
    env = environment(is_dry=call.is_dry)
    found = run_part("identify", command, limit_s=call.left_s(), log=log, records=call.scratch / "none", env=env)
    if not result.is_file():
        raise CaseError(
            f"error  Python can't start the parts: {last_line(log) or found.why}\n"
            f"rule   PyTorch 2.11 or newer and Meshwright's other dependencies are installed\n"
            f"fix    {sys.executable} -m pip install . in a clone of the repository, or PYTHONPATH=…"
        )
    answer = json.loads(result.read_text("utf-8"))
    if answer["gpu"] is None and not call.is_dry:
        raise CaseError(
            "error  PyTorch finds no CUDA device\n"
            "fix    python bench/gpu --dry runs the smallest case of each part on the CPU"
        )
    return Machine(None if call.is_dry else answer["gpu"], answer["versions"], answer["date"])


def environment(*, is_dry: bool) -> dict[str, str]:
    """Return the environment of the parts: our packages on the path, output not buffered, no network asked."""
    ours = os.pathsep.join(map(str, (ROOT / "src", ROOT / "bench", ROOT)))
    path = os.pathsep.join(filter(None, (ours, os.environ.get("PYTHONPATH"))))
    found = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TRANSFORMERS_OFFLINE": "1", "COLUMNS": "200"}
    return found | ({"OMP_NUM_THREADS": "1"} if is_dry else {})


def run_parts(parts: Sequence[Part], call: Call, machine: Machine) -> int:
    """Run the parts, write each one's results as it ends, show the table; return the exit status."""
    outcomes: list[Outcome] = []
    hide = {str(call.scratch): "SCRATCH", str(ROOT): ".", str(Path.home()): "~", sys.prefix: "PYTHON"}
    for part in parts:
        if any(outcome.interrupted for outcome in outcomes):
            outcomes.append(Outcome(part.name, State.NOT_RUN, "interrupted"))
            continue
        outcomes.append(_run_one(part, call, machine))
        write_json(call.out / f"{part.name}.json", part_json(outcomes[-1], machine, hide=hide))
        for line in rows(outcomes[-1]):
            print(line, flush=True)
    states = {one.part: {"state": one.state, "why": hidden(one.why, hide)} for one in outcomes}
    seconds = round(time.monotonic() - call.begin, 1)
    write_json(call.out / SUMMARY, {**machine.to_json(), "seconds": seconds, "parts": states})
    print()
    for line in table(outcomes, {part.name: part.keys for part in parts}):
        print(line)
    print(f"{seconds:.0f} s; results and {LOGS}:\n{_shown(call.out)}")
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def _run_one(part: Part, call: Call, machine: Machine) -> Outcome:
    """Run a part in the time that is left, or say that there is none."""
    left_s = call.left_s()
    limit_s = min(part.limit_s, left_s)
    if left_s < LEAST_S:
        return Outcome(part.name, State.NOT_RUN, f"no time left of {call.limit_s / 60:g} minutes")
    print(f"{part.name}: {part.title} (at most {limit_s:.0f} s) …", flush=True)
    records = call.scratch / f"{part.name}.jsonl"
    words = ["--cases", part.function, "--records", str(records), "--scratch", str(call.scratch)]
    words += ["--one-by-one"] if part.measures and not call.is_dry else []
    words += [] if machine.gpu is None else ["--gpu", machine.gpu]
    return run_part(
        part.name,
        [sys.executable, "-m", PROCESS, *words],
        limit_s=limit_s,
        log=call.out / LOGS / f"{part.name}.log",
        records=records,
        env=environment(is_dry=call.is_dry),
    )


def _shown(path: Path) -> str:
    """Return a path as a person would write it here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
