"""`meshwright prove script`: runs a script on each layout of the command line, compares with the first, and reports.
Imports torch late."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import InputError, RunError
from meshwright.prove.script.layout_choice import LayoutChoice, ScriptRun, parse_layout
from meshwright.train.launch.launcher import launch
from meshwright.train.launch.rank_context import RankContext
from meshwright.units import counted

Say = Callable[[str], None]
NUM_PERTURBED = 2
"""Further runs of the reference, with weights changed by one rounding unit, that measure tolerances."""

TIMED_OUT = "Timeout ("
"""What `faulthandler` prints above the stacks of a rank that reached the time limit."""


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

        def run(layout: LayoutChoice, label: str, seed: int = 0) -> ScriptRun:
            (folder / label).mkdir()
            path, given = script.resolve(), tuple(arguments)
            found = ScriptRun(path, layout, given, steps, folder / label, timeout_s, seed, folder / "reference")
            say(f"{script.name}: {layout}" + (", weights changed by rounding" if seed else "") + " …")
            _launch(found)
            _check_recorded(found)
            return found

        runs = [run(choices[0], "reference")]
        runs += [run(choices[0], f"perturbed-{seed}", seed) for seed in range(1, NUM_PERTURBED + 1)]
        runs += [run(layout, f"layout-{at}") for at, layout in enumerate(choices[1:], start=1)]
        launch(compare_body, runs, num_ranks=1, threads=1)
        answer = json.loads((folder / "result.json").read_text("utf-8"))
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


def _check_recorded(run: ScriptRun) -> None:
    """Check that all ranks recorded all steps.

    Raises:
        InputError: the script called no recorder, or ended before the last step.
    """
    lacking = [rank for rank in range(run.layout.num_ranks) if not run.record(rank).exists()]
    if lacking:
        printed = run.printed(lacking[0])
        raise InputError(
            f"{run.script.name} ended without {counted(run.num_steps, 'recorded step')} on rank {lacking[0]}",
            where=f"{run.script}, {run.layout}" + ("\n       " + printed.replace("\n", "\n       ") if printed else ""),
            rule="a script makes a meshwright.prove.Recorder and calls its step() after every step of the optimizer",
            fix="see docs/prove-scripts.md; if the script trains for fewer steps, lower --steps",
        )


def run_body(context: RankContext, run: ScriptRun) -> None:
    """Run the script as one rank. Imports torch here to keep the launcher torch-free."""
    from meshwright.prove.script.start_ranks import run_rank

    run_rank(context, run)


def compare_body(context: RankContext, runs: list[ScriptRun]) -> None:
    """Compare all runs: of the reference, changed ones of it, and of the layouts. Imports torch here, too."""
    from meshwright.prove.script.conclude import compare_runs

    context.post("comparing")
    reference, perturbed, layouts = runs[0], runs[1 : 1 + NUM_PERTURBED], runs[1 + NUM_PERTURBED :]
    compare_runs(reference, perturbed, layouts, reference.folder.parent / "result.json")
