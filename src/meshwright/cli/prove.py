"""`meshwright prove`: does this layout compute what one device computes?"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.style import paint
from meshwright.cli.words import WORDS_HELP, split_words
from meshwright.errors import InputError
from meshwright.output import check_output, write_output
from meshwright.units import format_duration

if TYPE_CHECKING:
    from meshwright.prove.spec import ProofSpec
    from meshwright.train.context import RankContext

STDOUT = Path("-")
JSON_OPTION = "command line, --json"


def prove(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[PRESET|FILE.toml] [KEY=VALUE]...", help=WORDS_HELP)
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to compare.")] = 3,
    plan_path: Annotated[
        Path | None, typer.Option("--plan", help="Prove this plan: one of meshwright plan -o, or changed by hand.")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write the result as JSON; - for stdout.")
    ] = None,
) -> None:
    """Prove in float64 that a layout computes the same losses, gradients and parameters as one process."""
    from meshwright.config.facts import run_facts
    from meshwright.plan.adopt import adopt_plan
    from meshwright.plan.load import load
    from meshwright.plan.make import make_plan
    from meshwright.prove.spec import ProofSpec, as_proof, plan_in_float64
    from meshwright.train.launch import context_from_environment, launch

    if context_from_environment() is not None:
        raise InputError(
            "prove was started by a launcher",
            where="WORLD_SIZE in the environment",
            rule="prove starts its own processes on this machine",
            fix="meshwright prove …, without torchrun",
        )
    if json_path is not None and json_path != STDOUT:
        check_output(json_path, where=JSON_OPTION)
    source, overrides = split_words(words)
    given = load(source, overrides)
    config = as_proof(given)
    plan = make_plan(config) if plan_path is None else plan_in_float64(adopt_plan(plan_path, given))

    # The configuration is right: from here on numpy may be imported.
    config.family.open_data(run_facts(config))
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="meshwright-proof-") as folder:
        spec = ProofSpec(config, plan, steps, Path(folder))
        axes = config.mesh.axes()
        _say(f"{config.name} · {axes} · {steps} steps in float64 …")
        launch(
            record_body,
            spec,
            num_ranks=axes.num_ranks(),
            threads=config.train.threads,
            describe_action=plan.action_words,
        )
        _say("comparing with the reference: one process, a plain module, a plain loop …")
        launch(compare_body, spec, num_ranks=1, threads=config.train.threads)
        answer = json.loads(spec.result.read_text("utf-8"))
    passed = answer["report"]["passed"]
    _show(answer["lines"], passed, time.perf_counter() - started, to_stderr=json_path == STDOUT)
    text = json.dumps(answer["report"], indent=1)
    if json_path == STDOUT:
        print(text)
    elif json_path is not None:
        write_output(json_path, text + "\n", where=JSON_OPTION)
    if not passed:
        sys.exit(1)


def record_body(context: RankContext, spec: ProofSpec) -> None:
    """What each rank of the layout runs; imports torch only there."""
    from meshwright.prove.driver import record_layout

    record_layout(context, spec)


def compare_body(context: RankContext, spec: ProofSpec) -> None:
    """What the reference's process runs; imports torch only there."""
    from meshwright.prove.driver import compare_with_reference

    compare_with_reference(context, spec)


def _say(text: str) -> None:
    """What a longer wait is for; on a terminal only, and gone when it is over."""
    if sys.stderr.isatty():
        print("\r\x1b[2K" + text, end="", file=sys.stderr, flush=True)


def _show(lines: list[str], passed: bool, seconds: float, *, to_stderr: bool) -> None:
    stream = sys.stderr if to_stderr else sys.stdout
    _say("")
    for line in lines:
        mark = line.lstrip()[:1]
        style = "green" if mark == "✓" else "red" if mark == "✗" else None
        print(paint(line, style, stream) if style else line, file=stream)
    verdict = paint("PROVED", "green", stream) if passed else paint("NOT PROVED", "red", stream)
    print(f"{verdict} in {format_duration(seconds)}", file=stream)
