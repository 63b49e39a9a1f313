"""A name on the Hugging Face Hub is answered with its download, wherever a file or folder is wanted; a path is not."""

from __future__ import annotations

import pytest

from meshwright.settings.import_object import download_fix
from tests.helpers import shown_error

QWEN = "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B (after hf auth login, if it is gated), then "
STORIES = "hf download a/stories --repo-type dataset --local-dir stories (after hf auth login, if it is gated), then "
DOORS = {
    "plan hf-tiny model.config=Qwen/Qwen3-0.6B": f"{QWEN}model.config=Qwen3-0.6B",
    "run llama-tiny data.tokenizer=Qwen/Qwen3-0.6B": f"{QWEN}data.tokenizer=Qwen3-0.6B",
    "generate Qwen/Qwen3-0.6B": f"{QWEN}the path Qwen3-0.6B",
    "checkpoint import Qwen/Qwen3-0.6B new": f"{QWEN}meshwright checkpoint import Qwen3-0.6B new",
    "run llama-tiny data.source=a/stories": f"{STORIES}data.source=stories",
    "prove dit-digits data.source=a/stories": f"{STORIES}data.source=stories",
}


@pytest.mark.parametrize("words", DOORS)
def test_the_command_that_downloads_it_is_said(here, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = here(*words.split())
    assert done.returncode == 2 and shown_error(done.stderr)["fix"] == DOORS[words]


PATHS = ("a/b.txt", "a/b.jsonl", "./a/b", "~/a/b", "/a/b", "a/b/c", "a", "a/b/", "there/one", "runs/one")


@pytest.mark.parametrize("path", PATHS)
def test_a_path_is_none(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    assert download_fix(path, "{}") is None
