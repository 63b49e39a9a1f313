"""Words of a configuration: what a shell completes, and what `meshwright keys` finds, best first."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from meshwright.cli.config_arguments import complete_words
from meshwright.config.foreign_names import KEYS
from meshwright.config.known_keys import known_keys, search
from meshwright.config.overlay import fields
from meshwright.models.contract.family import family_names


def test_all_keys_are_known_once_for_each_meaning() -> None:
    found = known_keys()
    assert {key.name for key in found} == {name for kind in family_names() for name in fields(kind)}
    assert len({(key.name, key.meaning) for key in found}) == len(found)
    for key in found:
        for kind in key.families or family_names():
            assert fields(kind)[key.name].description == key.meaning


@pytest.mark.parametrize("name", [name for names in KEYS.values() for name in names.split()])
def test_another_framework_s_name_finds_the_key_first(name: str) -> None:
    key = next(key for key, names in KEYS.items() if name in names.split())
    assert search(name)[0].name == key and name in search(name)[0].elsewhere


@pytest.mark.parametrize(
    ("text", "first"),
    [("lr", "train.lr"), ("WARMUP-steps", "train.warmup_steps"), ("tracker", "train.trackers"),
     ("logging_st", "train.log_every"), ("rank of the adapters", "lora.rank"),
     ("micro-batches per step", "train.num_microbatches")],
)  # fmt: skip
def test_words_find_keys_by_name_and_meaning(text: str, first: str) -> None:
    assert search(text)[0].name == first


def test_the_command_prints_what_is_found(here) -> None:
    done = here("keys", "save_total_limit")
    assert done.returncode == 0 and done.stdout.splitlines() == [
        "checkpoint.keep=2  int",
        "  number of newest checkpoints to keep",
        "  elsewhere: save_total_limit, keep_latest_k, max_checkpoints",
    ]
    assert here("keys", "no such key").returncode == 2
    assert "model.builder" in here("keys").stdout


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
