"""Data that proofs share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Many files shorter than a sample, of different lengths, as a word of the command."""
    folder = tmp_path_factory.mktemp("documents")
    for number in range(400):
        words = " ".join(f"{(number * 37 + word) % 91}" for word in range(1 + number * number % 4))
        (folder / f"{number}.txt").write_text(words, "utf-8")
    return f"data.source={folder}/*.txt"
