"""Fixes of errors about files work: checkpoints, exports, imports and plans. Those of runs are in `test_fixes`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import api
from meshwright.checkpoint import save_load
from meshwright.plan.rules import load
from tests.cli.test_fixes import raise_exit
from tests.helpers import SMALL, shown_error
from tests.models.specs import build


@pytest.fixture
def place(here: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run, a folder that is not empty, a plan, and models of others, as the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "launch", lambda *_arguments, **_options: raise_exit())
    config = load(None, SMALL)
    named = build(config.model.spec(), dtype=torch.float32).named_parameters()
    tensors = {f"model.{name}": torch.zeros(parameter.shape) for name, parameter in named}
    run = {"config": config.model_dump(), "corpus": "c", "skipped_in_a_row": 0}
    save_load.save(Path("runs/one/checkpoints"), 3, tensors, model=config.model.spec().identity(), run=run, keep=1)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    for name, config in {"bert": {"model_type": "bert"}, "scaled": {
        "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 256, "rope_parameters": yarn,
    }}.items():  # fmt: skip
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(config))
    Path("text.txt").write_text("def step(x): return x\n" * 3000)
    done = here("plan", "llama-tiny", "mesh.dp_shard=2", "train.global_batch=8", "-o", "plan.json")
    assert done.returncode == 0, done.stderr
    return tmp_path


RUN = "run llama-tiny data.source=text.txt data.cache_dir=cache train.seq_len=128"
CASES = {
    "no checkpoint in the folder of runs": ("checkpoint verify runs", "no checkpoint in runs"),
    "no checkpoint in a missing folder": ("checkpoint verify runs/two", "no checkpoint in runs/two"),
    "none elsewhere": ("checkpoint export elsewhere out", "no checkpoint in elsewhere"),
    "an export over files": ("checkpoint export runs/one bert", "bert exists and is not an empty directory"),
    "an export without adapters": ("checkpoint export runs/one out --merge", "no adapters to merge"),
    "another mesh": (f"{RUN} train.global_batch=8 --plan plan.json", "mesh.atoms[dp_shard] is 2 in the plan"),
    "another batch": (f"{RUN} mesh.dp_shard=2 --plan plan.json", "batch.global_batch is 8 in the plan"),
    "another mesh and batch": (f"{RUN} train.seq_len=32 train.num_microbatches=4 --plan plan.json", "in the plan"),
    "no plan": (f"{RUN} --plan text.txt", "not a plan"),
    "a missing plan": (f"{RUN} --plan nothing.json", "can't read nothing.json"),
}
"""Words, and what is wrong with them."""
IMPORTS = {"an encoder": ("bert", "bert is an encoder"), "YaRN": ("scaled", "the folder has no weights")}
"""Folders that an import hands on to runs of transformers' models, and what these say of them."""


def repaired(words: list[str], fix: str) -> list[list[str]]:
    """The commands that follow a fix: what it names is run, with what it leaves open filled in."""
    first = re.split(r", or |, then ", fix)[0]
    if "meshwright plan" in first:
        return [["plan", "llama-tiny", "-o", "made.json"], [*words[: words.index("--plan")], "--plan", "made.json"]]
    if "meshwright checkpoint export without" in first:
        return [[word for word in words if word != "--merge"]]
    if other := re.fullmatch(r"another folder, such as (.+)", first):
        return [[*words[:-1], *shlex.split(other[1])]]
    if named := re.fullmatch(r"pass (\S+)", re.split(r", which ", first)[0]):
        return [[*words[:2], named[1], *words[3:]]]
    if first.startswith("meshwright "):
        return [shlex.split(first)[1:]]
    settings = shlex.split(first)
    assert settings and all("=" in one for one in settings), fix
    return [[*words, *settings]]


@pytest.mark.parametrize("name", CASES)
def test_fixes_of_files_work(here: Callable[..., Any], place: Path, name: str) -> None:
    words, wrong = CASES[name][0].split(), CASES[name][1]
    done = here(*words, torch=True)
    error = shown_error(done.stderr)
    assert done.returncode == 2 and wrong in error["error"], error
    for command in repaired(words, error["fix"]):
        done = here(*command, torch=True)
        assert done.returncode == 0, (command, done.stderr)


@pytest.mark.parametrize("name", IMPORTS)
def test_fixes_of_imports_lead_to_the_folder(here: Callable[..., Any], place: Path, name: str) -> None:
    folder, said = IMPORTS[name]
    words = ["checkpoint", "import", folder, "out"]
    [command] = repaired(words, shown_error(here(*words, torch=True).stderr)["fix"])
    assert command[:3] == ["run", "hf-tiny", f"model.config={folder}"]
    assert said in shown_error(here(*command, torch=True).stderr)["error"]
