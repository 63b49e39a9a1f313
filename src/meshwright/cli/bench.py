"""`meshwright bench PART`: the one entry to every benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def bench(
    part: Annotated[str, typer.Argument(help="What to measure.")],
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the figures as JSON.")] = None,
) -> None:
    """Measure a part of Meshwright against the obvious alternative, in one run."""
    raise typer.Exit(2)
