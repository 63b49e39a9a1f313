"""`python -m tests.fuzz --seed N --count K [--prove [--as-run]|--stop]`: random configurations, each run and judged.

Each case is printed as its command, to be typed in the folder with the files that it names. It fails on a crash, a
hang, a refusal whose fix is refused, or losses that aren't those of one process; with --prove, on a proof that fails;
with --stop also if it is stopped, continued by the command that it prints, and isn't bitwise the same.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.case import Case
from tests.fuzz.commands import Commands
from tests.fuzz.draw import NEVER, draw
from tests.fuzz.judge import Verdict, judge, shrink
from tests.fuzz.stopped import judge_stopped
from tests.gangs.gang import PRELOAD, start_server

FOLDER = Path("build/fuzz")
PRELOADED = (
    "meshwright.train.launch.rank_imports", *PRELOAD, "meshwright.models.hf.preload", "peft", "sklearn.svm",
    "matplotlib.figure", "matplotlib.backends.backend_agg", "torch._dynamo", "meshwright.api", "meshwright.cli.main",
    "meshwright.models.decoder.module", "meshwright.models.dit.module", "meshwright.models.dit.task",
    "meshwright.models.tasks.next_token", "meshwright.dtensor_ops.fallback", "meshwright.train.training_loop",
    "tests.quiet", "tests.fuzz.draw", "tests.fuzz.judge",
)  # fmt: skip
"""Modules of the server that commands are forked from, and ranks from these."""


def main() -> int:
    """Draw, run and judge the cases; print each, the failures made small, and a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=30, help="number of cases")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", type=int, help="number of a single case")
    parser.add_argument("--prove", action="store_true", help="prove the configurations instead of running them")
    parser.add_argument("--as-run", action="store_true", help="with --prove: as configured, in the run's precision")
    parser.add_argument("--stop", action="store_true", help="stop each run, and continue it by the command it prints")
    parser.add_argument("--no-shrink", action="store_true", help="leave failed cases as they were drawn")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="files and runs of the cases")
    options = parser.parse_args()
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    start_server(PRELOADED)
    proves = ("--as-run",) if options.as_run else ("--steps", "2")
    run, verb = Commands(options.folder.absolute(), proves), "prove" if options.prove else "run"

    def decide(case: Case, number: int) -> Verdict:
        return judge_stopped(run, case, seed=number) if options.stop else judge(run, case, verb=verb, seed=number)

    last = options.first + options.count
    numbers = range(options.first, last) if options.only is None else [options.only]
    verdicts, started = list[Verdict](), time.monotonic()
    print(f"in {options.folder}; not drawn: {'; '.join(f'{key} ({why})' for key, why in NEVER.items())}")
    for number in numbers:
        case = draw(options.seed, number)
        print(f"[{options.seed} {number}] {case.command(verb)}", flush=True)
        verdict = decide(case, number)
        verdicts.append(verdict)
        _show(verdict)
        if verdict.failure and not options.no_shrink:
            small = shrink(verdict, lambda one: decide(one, number))  # noqa: B023
            print(f"    smallest: {small.command(verb)}", flush=True)
    _show_table(verdicts, time.monotonic() - started)
    return int(any(verdict.failure for verdict in verdicts))


def _show(verdict: Verdict) -> None:
    for fix in verdict.fixes:
        print(f"    refused; fix: {fix}")
    print(f"    {verdict.summary}: {verdict.failure or verdict.action or verdict.compared}".rstrip(": "), flush=True)
    if verdict.failure:
        print("\n".join(f"      {line}" for line in verdict.detail.splitlines()), flush=True)


def _show_table(verdicts: list[Verdict], seconds: float) -> None:
    rows = Counter(verdict.summary for verdict in verdicts)
    print(f"\n{len(verdicts)} cases in {seconds:.0f} s")
    for name, count in rows.most_common():
        print(f"{count:6}  {name}")
    compared = Counter(verdict.compared for verdict in verdicts if verdict.compared)
    print(f"{compared['exact']:6}  of them with the losses of one process, {compared['rounded']} more after rounding")
    print(f"{sum(len(verdict.fixes) for verdict in verdicts):6}  fixes followed")


if __name__ == "__main__":
    raise SystemExit(main())
