"""The command `meshwright bench PART`."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Annotated, TextIO

import typer

from meshwright.cli.wrapping import paint, show
from meshwright.errors import InputError
from meshwright.output_files import check_output, write_output
from meshwright_bench.benchmarks import BENCHMARKS, DeviceChoice, Options, find_benchmark, load_body
from meshwright_bench.report import as_json, table

STDOUT = Path("-")
JSON_OPTION = "command line, --json"
PART_HELP = "; ".join(f"{part}: {row.title}" for part, row in BENCHMARKS.items())


def bench(
    part: Annotated[str, typer.Argument(help=PART_HELP)],
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write the results as JSON; - for stdout.")
    ] = None,
    device: Annotated[
        DeviceChoice, typer.Option(help="Device to measure on; auto uses a CUDA device if there is one.")
    ] = DeviceChoice.AUTO,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds per comparison, such as 5; by default, chosen by the benchmark.")
    ] = None,
    cluster: Annotated[
        str, typer.Option(metavar="DEVICE|FILE", help="Cluster that predictions are for: this machine as calibrated.")
    ] = "here",
) -> None:
    """Compare a part of Meshwright with an alternative; both sides alternate in one run."""
    from meshwright.train.launch.launcher import context_from_environment

    if context_from_environment() is not None:
        raise InputError(
            "bench was started by a launcher",
            where="WORLD_SIZE in the environment",
            rule="bench starts its own processes on this machine",
            fix="meshwright bench …, without torchrun",
        )
    body = load_body(find_benchmark(part))
    if json_path is not None and json_path != STDOUT:
        check_output(json_path, where=JSON_OPTION)
    report = body(Options(device, rounds, cluster), _say)
    _say("")
    to_stdout = json_path == STDOUT
    _show(table(report), sys.stderr if to_stdout else sys.stdout)
    text = json.dumps(as_json(report), indent=1, ensure_ascii=False)
    if to_stdout:
        print(text)
    elif json_path is not None:
        write_output(json_path, text + "\n", where=JSON_OPTION)


def _say(text: str) -> None:
    """Show the reason for a long wait in a transient line, on terminals only."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        print("\r\x1b[2K" + text[:width], end="", file=sys.stderr, flush=True)


def _show(lines: list[str], stream: TextIO) -> None:
    for line in lines:
        style = "green" if "✓" in line else "red" if "✗" in line else None
        show(paint(line, style, stream) if style else line, stream)
