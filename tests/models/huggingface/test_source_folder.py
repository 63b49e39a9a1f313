"""A source that can't be imported is answered with a command or an act that helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.errors import CheckpointError
from meshwright.models.huggingface.checks import check_source


def refused(source, out="runs/new"):
    with pytest.raises(CheckpointError) as caught:
        check_source(source, out)
    return caught.value


def test_a_name_on_the_hub_is_answered_with_its_download(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = refused(Path("meta-llama/Llama-3.1-8B"))
    assert "nothing is downloaded" in error.rule
    assert error.fix.startswith(
        "hf download meta-llama/Llama-3.1-8B --local-dir Llama-3.1-8B (after hf auth login, if it is gated), "
        "then meshwright checkpoint import Llama-3.1-8B runs/new"
    )
    (tmp_path / "runs").mkdir()
    assert "hf download" not in refused(Path("runs/other")).fix  # a path with a typing error
    (tmp_path / "meta-llama/Llama-3.1-8B").mkdir(parents=True)
    (tmp_path / "meta-llama/Llama-3.1-8B/config.json").write_text("{}")
    check_source(Path("meta-llama/Llama-3.1-8B"), Path("runs/new"))  # a folder of that name


def test_a_path_that_is_no_folder(tmp_path):
    assert "folder not found" in refused(tmp_path / "nothing").what
    (tmp_path / "config.json").write_text("{}")
    error = refused(tmp_path / "config.json")
    assert "is a file" in error.what and error.fix == f"meshwright checkpoint import {tmp_path} runs/new"


@pytest.mark.parametrize("inside", ["model", "snapshots/0e9e39f"])
def test_a_folder_above_the_model_is_answered_with_the_model(tmp_path, inside):
    error = refused(tmp_path)
    assert error.what == f"config.json is missing from {tmp_path}" and "download" in error.fix
    (tmp_path / inside).mkdir(parents=True)
    (tmp_path / inside / "config.json").write_text("{}")
    assert refused(tmp_path).fix == f"meshwright checkpoint import {tmp_path / inside} runs/new"
