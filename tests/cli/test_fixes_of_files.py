"""Fixes of errors about files work: checkpoints, exports, imports and plans. Those of runs are in `test_fixes`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright import api
from meshwright.checkpoint import atomic_directory
from meshwright.checkpoint.durable_files import write_file
from meshwright.config.facts_for_family import model_facts
from meshwright.plan.load_config import load
from tests.cli.test_fixes import raise_exit
from tests.helpers import SMALL, shown_error


@pytest.fixture
def place(here: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run, a folder that is not empty, a plan, and models of others, as the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "launch", lambda *_arguments, **_options: raise_exit())
    config = load(None, SMALL)
    written = atomic_directory.begin(Path("runs/one/checkpoints"), 3)
    files = {"data": write_file(written / "data", b"x" * 1000)}
    run = {"config": config.model_dump(mode="json"), "corpus": "c", "skipped_in_a_row": 0}
    atomic_directory.commit(written, step=3, model=dict(model_facts(config).identity), run=run, files=files)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    for name, config in {"bert": {"model_type": "bert"}, "yarn": {
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
    "no checkpoint in the folder of runs": "checkpoint verify runs",
    "no checkpoint in a missing folder": "checkpoint verify runs/two",
    "none elsewhere": "checkpoint export elsewhere out",
    "an export over files": "checkpoint export runs/one runs/one",
    "an export without adapters": "checkpoint export runs/one out --merge",
    "an import of a model that needs none": "checkpoint import bert out",
    "an import of YaRN": "checkpoint import yarn out",
    "another mesh": f"{RUN} train.global_batch=8 --plan plan.json",
    "another batch": f"{RUN} mesh.dp_shard=2 --plan plan.json",
    "another mesh and batch": f"{RUN} mesh.dp_shard=1 train.seq_len=32 train.num_microbatches=4 --plan plan.json",
    "no plan": f"{RUN} --plan text.txt",
    "a missing plan": f"{RUN} --plan nothing.json",
}


def repaired(words: list[str], fix: str) -> list[list[str]]:
    """The commands that follow a fix: what it names is run, with what it leaves open filled in."""
    first = re.split(r", or |, then ", fix)[0]
    if "meshwright plan …" in first:
        return [["plan", "llama-tiny", "-o", "made.json"], [*words[: words.index("--plan")], "--plan", "made.json"]]
    if "meshwright checkpoint export" in first:
        kept = [word for word in words if word != "--merge"]
        return [kept if "without" in first else [*kept[:-1], shlex.split(first)[-1]]]
    if named := re.fullmatch(r"pass (\S+)", re.split(r", which ", first)[0]):
        return [[*words[:2], named[1], *words[3:]]]
    if first.startswith("meshwright "):
        return [shlex.split(first)[1:]]
    return [[*words, *shlex.split(first)]]


@pytest.mark.parametrize("name", CASES)
def test_fixes_of_files_lead_on(here: Callable[..., Any], place: Path, name: str) -> None:
    """To a success, or another error: the files of this run's checkpoint are made up."""
    words = CASES[name].split()
    done = here(*words, torch=True)
    assert done.returncode == 2, done.stdout
    error = shown_error(done.stderr)
    for command in repaired(words, error["fix"]):
        done = here(*command, torch=True)
        assert done.returncode in (0, 2), done.stderr
    assert done.returncode == 0 or shown_error(done.stderr)["error"] != error["error"], error
