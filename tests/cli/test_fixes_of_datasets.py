"""Fixes of errors about Parquet files and saved datasets lead to a start, as those of text in `test_fixes`."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright import api
from tests.cli.test_fixes import TEXT, follow, raise_exit
from tests.fuzz.case import Case

library = pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records as a table and as saved datasets."""
    folder = tmp_path_factory.mktemp("datasets")
    library.disable_progress_bars()
    rows = [{"body": f"def {one}", "number": 3, "my text": one} for one in TEXT.split("def ") if one]
    records = library.Dataset.from_list(rows)
    records.to_parquet(folder / "table.parquet")
    records.save_to_disk(folder / "stored")
    library.DatasetDict({"train": records}).save_to_disk(folder / "several")
    return folder


CASES = {
    "no column of Parquet": "data.source=table.parquet",
    "another column of Parquet": "data.source=table.parquet data.text_field=bdy",
    "a column of numbers": "data.source=table.parquet data.text_field=number",
    "no column of a saved dataset": "data.source=stored",
    "another column of a saved dataset": "data.source=stored data.text_field=bdy",
    "conversations of a saved dataset": "data.source=stored data.chat_field=body",
    "several saved datasets": "data.source=several data.text_field=body",
}


@pytest.mark.parametrize("name", CASES)
def test_fixes_of_datasets_lead_to_a_start(
    here: Callable[..., Any], files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "launch", lambda *_arguments, **_options: raise_exit())
    case = Case("llama-tiny", ("data.cache_dir=cache", "train.seq_len=64", *shlex.split(CASES[name])))
    assert follow(here, case)
