"""`meshwright prove script`: runs a script on each layout of the command line, compares with the first, and reports.
Imports torch late."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import InputError, RunError
from meshwright.prove.script.layout_choice import ScriptRun, parse_layout, unit_path
from meshwright.train.launch.launcher import launch
from meshwright.train.launch.rank_context import RankContext

Say = Callable[[str], None]
NUM_PERTURBED = 2
"""Further runs of the reference, with weights changed by one rounding unit, that measure tolerances."""

TIMED_OUT = "Timeout ("
"""What `faulthandler` prints above the stacks of a rank that reached the time limit."""


@dataclass(frozen=True)
class _Runs:
    """All runs of a proof, to be compared in a process of its own."""

    reference: ScriptRun
    perturbed: tuple[ScriptRun, ...]
    layouts: tuple[ScriptRun, ...]
    result: Path


def prove_layouts(
    script: Path, layouts: Sequence[str], *, arguments: Sequence[str], steps: int, timeout_s: float, say: Say
) -> tuple[list[str], dict[str, Any]]:
    """Run a script on all layouts and compare; return the lines of the report and its JSON values.

    `meshwright.api.prove_script` documents the arguments.
    """
    if not script.is_file():
        raise InputError(
            f"file not found: {script}",
            where="command line, SCRIPT",
            rule="the script to prove is a Python file",
            fix="the path of an existing script",
        )
    choices = [parse_layout(text) for text in layouts]
    if len(choices) < 2:
        raise InputError(
            "a proof needs two layouts" if choices else "no layout was given",
            where="command line, --layout",
            rule="the first layout is the reference, with which the others are compared",
            fix='--layout "1" --layout "2"',
        )
    with tempfile.TemporaryDirectory(prefix="meshwright-proof-") as name:
        folder = Path(name)

        def run(at: int, label: str, seed: int = 0, unit: float = 0.0) -> ScriptRun:
            (folder / label).mkdir()
            path, given = script.resolve(), tuple(arguments)
            found = ScriptRun(path, choices[at], given, steps, folder / label, timeout_s, seed, unit)
            say(f"{script.name}: {found.layout}" + (", weights changed by rounding" if seed else "") + " …")
            _launch(found)
            return found

        reference = run(0, "reference")
        files = [unit_path(reference.folder, rank) for rank in range(reference.layout.num_ranks)]
        unit = max((float(file.read_text()) for file in files if file.exists()), default=0.0)
        perturbed = tuple(run(0, f"perturbed-{seed}", seed, unit) for seed in range(1, NUM_PERTURBED + 1))
        others = tuple(run(at, f"layout-{at}") for at in range(1, len(choices)))
        runs = _Runs(reference, perturbed, others, folder / "result.json")
        launch(compare_body, runs, num_ranks=1, threads=1)
        answer = json.loads(runs.result.read_text("utf-8"))
    say("")
    return answer["lines"], answer["report"]


def _launch(run: ScriptRun) -> None:
    """Run the script on a layout.

    Raises:
        RunError: a rank failed, or the time limit was reached; then it says where each rank was.
    """
    try:
        launch(run_body, run, num_ranks=run.layout.num_ranks, threads=1)
    except RunError:
        places = []
        for rank in range(run.layout.num_ranks):
            _, late, stacks = run.printed(rank, num_lines=1000).rpartition(TIMED_OUT)
            own = [line.strip() for line in stacks.splitlines() if str(run.script) in line]
            places += [f"rank {rank}: {(own or ['outside the script'])[0]}"] if late else []
        if not places:
            raise
        raise RunError(
            f"{run.script.name} did not end within {run.timeout_s:g} s on {run.layout}",
            where="\n       ".join(places),
            rule="--timeout limits each run; ranks that wait for each other never end",
            fix="look at where each rank waits; for a slow script, a larger --timeout",
        ) from None


def run_body(context: RankContext, run: ScriptRun) -> None:
    """Run the script as one rank. Imports torch here to keep the launcher torch-free."""
    from meshwright.prove.script.start_ranks import run_rank

    run_rank(context, run)


def compare_body(context: RankContext, runs: _Runs) -> None:
    """Compare all runs. Imports torch here to keep the launcher torch-free."""
    from meshwright.prove.script.conclude import compare_runs

    context.post("comparing")
    compare_runs(runs.reference, runs.perturbed, runs.layouts, runs.result)
