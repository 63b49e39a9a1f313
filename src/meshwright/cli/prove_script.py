"""`meshwright prove script`: prove that a training script computes the same on several layouts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.prove import JsonPath, prove_and_show, say

if TYPE_CHECKING:
    from meshwright.api import Proof


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
