"""`bench operators`: which of PyTorch's operators run right on DTensors, alone and with `replicate_fallback`.

Torch-free: runs in the launcher, starts the ranks and counts what they noted. DTensor alone lets ranks die or wait
for each other for ever on some operators; then the ranks are started again behind that operator.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterable
from datetime import date
from pathlib import Path

from meshwright.errors import InputError, RunError
from meshwright.train.launch.launcher import launch
from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.benchmarks import Options, Part, Say
from meshwright_bench.devices import refuse_cuda
from meshwright_bench.operators.cases import Case, Outcome, Placed, Side, SweepTask, end_line
from meshwright_bench.report import Figure, Report, cpu_name

NUM_RANKS = 4


AT_MOST_NONE = (Outcome.WRONG, Outcome.NOT_IMPLEMENTED, Outcome.OTHER_ERROR)
"""With the fallback."""

NOTES = (
    f"PyTorch's own samples of its operators (op_db), the first in float32 of each, forward, on {NUM_RANKS} gloo "
    "processes; all inputs Shard(0), or all Replicate()",
    "dtensor: DTensor alone; fallback: inside replicate_fallback(), with our rules; both against plain tensors",
)


def bench_operators(options: Options, say: Say) -> Report:
    """Run every operator on both sides, on the CPU.

    Raises:
        InputError: CUDA was asked for, or PyTorch's samples can't be imported.
    """
    refuse_cuda(options, Part.OPERATORS, because="it asks which operators run, which is the same on any device")
    figures = []
    for side in Side:
        say(f"{side}: all operators …")
        figures += operator_figures(side, run_side(side))
    return Report(Part.OPERATORS, cpu_name(), date.today().isoformat(), tuple(figures), NOTES)


def run_side(side: Side) -> list[Case]:
    """What came of every operator, both ways placed."""
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        lines = Path(folder) / "lines"
        lines.touch()
        while True:
            num_done = len(read_cases(lines))
            try:
                launch(sweep_body, SweepTask(lines, side, num_done), num_ranks=NUM_RANKS, threads=1)
            except InputError:
                raise
            except RunError as error:
                if len(read_cases(lines)) == num_done and _is_complete(lines):
                    raise  # it did not get as far as an operator
                end_line(lines, Outcome.OTHER_ERROR, f"a rank died: {error.what}")
            else:
                return read_cases(lines)


def operator_figures(side: Side, cases: Iterable[Case]) -> list[Figure]:
    """Counts of outcomes, by how inputs lie."""
    counts = Counter((case.placed, case.outcome) for case in cases)
    return [
        Figure(
            f"{side}.{placed}.{outcome}",
            counts[placed, outcome],
            "operators",
            at_most=0 if side is Side.FALLBACK and outcome in AT_MOST_NONE else None,
        )
        for placed in Placed
        for outcome in Outcome
    ]


def read_cases(lines: Path) -> list[Case]:
    """The cases in a file of lines, but for one that was begun and has no outcome."""
    found = []
    for line in lines.read_text("utf-8").splitlines():
        fields = line.split("\t")
        if len(fields) == 4:
            found.append(Case(fields[0], Placed(fields[1]), Outcome(fields[2]), json.loads(fields[3])))
    return found


def _is_complete(lines: Path) -> bool:
    text = lines.read_text("utf-8")
    return not text or text.endswith("\n")


def sweep_body(context: RankContext, task: SweepTask) -> None:
    """What each rank runs; imports torch only there."""
    from meshwright_bench.operators.sweep import run_sweep

    run_sweep(context, task)
