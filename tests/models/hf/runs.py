"""Runs of tiny models of transformers, on the standard library's source, and their checkpoints."""

from __future__ import annotations

import json
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

from meshwright.checkpoint import safetensors_file
from meshwright.checkpoint.manifest import newest_valid
from meshwright.checkpoint.reader import read_tensor
from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.models.contract.family import RunFacts
from meshwright.models.foreign.structure import Structure
from meshwright.models.hf.family import structure_of
from meshwright.models.hf_format.weights import PREFIX
from meshwright.plan.rules import load
from meshwright.train import rank_run
from meshwright.train.choose_folder import choose_folder
from meshwright.train.launch.rank_context import RunSpec
from meshwright.train.record.reporter import Reporter
from meshwright.train.run_folder import RunFolder
from tests.gangs.gang import GangPool
from tests.helpers import open_data, rank_context
from tests.prove.proofs import SOURCE

SETTINGS = ("train.seq_len=32", "train.global_batch=8", "train.num_microbatches=2", f"data.source={SOURCE}")


def hf_config(model: str, *words: str) -> RunConfig:
    """The configuration of a run of a model type, or of a folder."""
    return load("hf-tiny", [f"model.config={model}", *SETTINGS, *words])


def hf_facts(model: str, *words: str) -> RunFacts:
    """Return what the family is told of such a run."""
    return run_facts(hf_config(model, *words))


def hf_structure(model: str, *words: str) -> Structure:
    """The structure of its model."""
    return structure_of(hf_facts(model, *words))


def run(gang: GangPool, config: RunConfig, out: Path, *, resume: str | None = None) -> list[dict[str, Any]]:
    """Run in the gang's processes what the command runs in processes of its own, and return the metrics."""
    with ExitStack() as hold:
        folder = choose_folder(config, out=out, resume=resume, corpus=open_data(config).fingerprint, hold=hold)
        gang(config.mesh.axes().num_ranks()).run(_run, config, folder)
    return [json.loads(line) for line in folder.metrics.read_text("utf-8").splitlines()]


def _run(rank: int, world_size: int, config: RunConfig, folder: RunFolder) -> None:
    """Gang body: train as this rank, in the group that there is."""
    context = rank_context(rank, world_size)
    with mock.patch.object(rank_run, "rank_group", lambda *_: nullcontext()):
        rank_run.run_rank(context, RunSpec(config, Reporter, folder=folder))


def saved(out: Path) -> dict[str, Tensor]:
    """The parameters and buffers in the newest checkpoint of a run, by name."""
    found = newest_valid(out / "checkpoints")[0]
    assert found is not None
    stored = safetensors_file.read_layout(found)
    names = [name for name in stored.tensors if name.startswith(PREFIX)]
    return {name.removeprefix(PREFIX): read_tensor(stored, name) for name in names}
