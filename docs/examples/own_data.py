"""Rows of a SQLite table as documents, as an example of text of your own.

PYTHONPATH=docs/examples NOTES=notes.db meshwright run llama-tiny data.source=own_data:Notes
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path


class Notes:
    """Texts of the table `notes` of the database that the environment names, in the order of their ids."""

    def __init__(self) -> None:
        path = Path(os.environ["NOTES"]).resolve()
        status = path.stat()
        self.identity = f"{path} {status.st_size} {status.st_mtime_ns}"
        self._rows = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
        self._ids = [number for (number,) in self._rows.execute("SELECT id FROM notes ORDER BY id")]

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> str:
        (text,) = self._rows.execute("SELECT text FROM notes WHERE id = ?", (self._ids[index],)).fetchone()
        return str(text)
