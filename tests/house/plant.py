"""Synthetic repositories for the checkers to judge."""

from __future__ import annotations

from pathlib import Path

from tests.house.source import Tree


def plant(root: Path, files: dict[str, str]) -> Tree:
    """A repository of these files; paths are inside the package but for those in `tests/` or `docs/`."""
    for path, text in files.items():
        file = root / path if path.startswith(("tests/", "docs/")) else root / "src/meshwright" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return Tree.read(root)
