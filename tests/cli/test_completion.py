"""Shell completion: presets, files, keys, and values of keys that have a few."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from meshwright.cli.config_arguments import complete_words


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("llama3", ["llama3-405b", "llama3-70b", "llama3-8b"]),
        ("mine", ["mine.toml"]),
        ("mesh.dp", ["mesh.dp_replicate=", "mesh.dp_shard="]),
        ("diffusion.guid", ["diffusion.guidance="]),  # of another family than the default's
        ("train.precision=", ["train.precision=float32", "train.precision=bfloat16", "train.precision=float64"]),
        ("train.compile=t", ["train.compile=true"]),
        ("train.steps=", []),
        ("no.such=", []),
    ],
)
def test_words_of_a_configuration(tmp_path, monkeypatch, typed, found):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").touch()
    assert complete_words(typed) == found


@pytest.mark.slow
def test_bash_is_answered_without_torch(tmp_path):
    """Called as by the function that `--show-completion` prints; an import of torch would fail."""
    (tmp_path / "torch.py").write_text("raise AssertionError('completion imports torch')")
    environment = os.environ | {
        "_MESHWRIGHT_COMPLETE": "complete_bash", "COMP_WORDS": "meshwright run mist", "COMP_CWORD": "2",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
    }  # fmt: skip
    command = [sys.executable, "-c", "import sys; sys.argv = ['meshwright']; import meshwright.__main__ as m; m.main()"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.stdout.split() == ["mistral-7b"], done.stderr
