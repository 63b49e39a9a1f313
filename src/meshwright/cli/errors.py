"""Error output: the problem, its location, the rule and the fix."""

from __future__ import annotations

import sys

from meshwright.cli.colors import CLEAR_LINE, is_terminal, paint
from meshwright.cli.wrapping import show
from meshwright.errors import MeshwrightError


def show_error(error: MeshwrightError) -> None:
    """Print an error to stderr."""
    sys.stdout.flush()
    if is_terminal(sys.stderr):
        print(CLEAR_LINE, end="", file=sys.stderr)  # there may be an unfinished progress line
    parts = (("error", error.what), ("where", error.where), ("rule", error.rule), ("fix", error.fix))
    for label, text in parts:
        if text:
            style = "red" if label == "error" else "bold"
            for number, line in enumerate(text.splitlines()):
                shown = f"{paint(f'{label:<5}', style, sys.stderr)}  {line}" if number == 0 else line
                if label in ("where", "fix"):  # paths and commands are copied
                    print(shown, file=sys.stderr)
                else:
                    show(shown, sys.stderr, more=" " * 7)
