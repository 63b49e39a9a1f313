"""`meshwright prove`: prove that a layout, or a training script on several, computes the same as one device."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.config_arguments import Words, split_words
from meshwright.cli.wrapping import paint, show
from meshwright.errors import InputError
from meshwright.output_files import check_output, write_output
from meshwright.units import counted, format_duration

if TYPE_CHECKING:
    from meshwright.api import Proof

STDOUT = Path("-")
JSON_OPTION = "command line, --json"
JsonPath = Annotated[Path | None, typer.Option("--json", help="Also write the result as JSON; - for stdout.")]


def prove(
    words: Words = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Optimizer steps to compare, such as 3; by default 3 or, as run, what it needs.",
            show_default=False,
        ),
    ] = None,
    plan_path: Annotated[
        Path | None, typer.Option("--plan", help="Prove this plan, written by meshwright plan -o and possibly edited.")
    ] = None,
    as_run: Annotated[
        bool, typer.Option("--as-run", help="Prove the run in its precision, compiled and compressed, not in float64.")
    ] = False,
    catalogue: Annotated[
        bool,
        typer.Option(
            "--catalogue",
            help="Prove every causal language model of the installed transformers, built small, or only the model "
            "types given as words, on several layouts.",
        ),
    ] = False,
    json_path: JsonPath = None,
) -> None:
    """Prove that a layout computes the same losses, gradients and parameters as one process in float64."""
    from meshwright import api

    if catalogue:
        show_catalogue(words or [], steps, json_path)
        return

    def proof() -> Proof:
        source, overrides = split_words(words)
        return api.prove(api.load_config(source, *overrides), steps=steps, plan=plan_path, as_run=as_run, say=say)

    prove_and_show(proof, json_path)


def prove_and_show(prove: Callable[[], Proof], json_path: Path | None) -> None:
    """Run a proof, show its report, write the JSON, and exit with 1 if the proof failed.

    Raises:
        InputError: this is a rank of a launcher, or the JSON can't be written.
    """
    _check_start(json_path)
    started = time.perf_counter()
    proof = prove()
    _show(proof, time.perf_counter() - started, to_stderr=json_path == STDOUT)
    text = json.dumps(proof.report, indent=1)
    if json_path == STDOUT:
        print(text)
    elif json_path is not None:
        write_output(json_path, text + "\n", where=JSON_OPTION)
    if not proof:
        sys.exit(1)


def show_catalogue(words: list[str], steps: int | None, json_path: Path | None) -> None:
    """Prove the catalogue, show each outcome and a table, write both as JSON, and exit with 1 if a proof failed.

    `words` are model types, and keys of every case.
    """
    from meshwright import api
    from meshwright.prove.catalogue import Outcome, Result, counts, table, to_json

    _check_start(json_path)
    models = [word for word in words if "=" not in word]
    keys = [word for word in words if "=" in word]

    def note(one: Result) -> None:
        say(f"{one.model} · {one.layout}: {one.outcome}")

    started = time.perf_counter()
    results = api.prove_catalogue(models, words=keys, steps=steps or 2, say=note)
    say("")
    stream = sys.stderr if json_path == STDOUT else sys.stdout
    for line in (*table(results), "", *counts(results)):
        print(line, file=stream)
    print(f"{counted(len(results), 'case')} in {format_duration(time.perf_counter() - started)}", file=stream)
    text = to_json(results)
    if json_path == STDOUT:
        print(text)
    elif json_path is not None:
        write_output(json_path, text + "\n", where=JSON_OPTION)
    if any(one.outcome in (Outcome.WRONG, Outcome.FAILED) for one in results):
        sys.exit(1)


def _check_start(json_path: Path | None) -> None:
    """Check that proofs can start, and that their result can be written.

    Raises:
        InputError: this is a rank of a launcher, or the JSON can't be written.
    """
    from meshwright.train.launch.launcher import context_from_environment

    if context_from_environment() is not None:
        raise InputError(
            "prove was started by a launcher",
            where="WORLD_SIZE in the environment",
            rule="prove starts its own processes on this machine",
            fix="the same command without torchrun",
        )
    if json_path is not None and json_path != STDOUT:
        check_output(json_path, where=JSON_OPTION)


def say(text: str) -> None:
    """Show the reason for a wait, on terminals only; the next call overwrites it."""
    if sys.stderr.isatty():
        print("\r\x1b[2K" + text, end="", file=sys.stderr, flush=True)


def _show(proof: Proof, seconds: float, *, to_stderr: bool) -> None:
    stream = sys.stderr if to_stderr else sys.stdout
    for line in proof.lines:
        mark = line.lstrip()[:1]
        style = "green" if mark == "✓" else "red" if mark == "✗" else None
        show(paint(line, style, stream) if style else line, stream)
    verdict = paint("PROVED", "green", stream) if proof else paint("NOT PROVED", "red", stream)
    print(f"{verdict} in {format_duration(seconds)}", file=stream)


def prove_script(
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", help="A training script with a meshwright.prove.Recorder.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENT...]", help="Arguments of the script on every layout.")
    ] = None,
    layouts: Annotated[
        list[str] | None,
        typer.Option(
            "--layout", help="Processes, then arguments of the script (4 --tp 2); the first is the reference."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to compare.")] = 3,
    timeout_s: Annotated[float, typer.Option("--timeout", min=1.0, help="Seconds that each run may take.")] = 300.0,
    json_path: JsonPath = None,
) -> None:
    """Prove that a training script of yours computes the same on several layouts."""
    from meshwright import api

    def proof() -> Proof:
        given = arguments or []
        return api.prove_script(script, layouts or [], arguments=given, steps=steps, timeout_s=timeout_s, say=say)

    prove_and_show(proof, json_path)
