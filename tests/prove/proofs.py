"""Proofs on the gang's ranks: what `meshwright prove` does, without starting processes."""

from __future__ import annotations

import importlib
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

import torch.distributed as dist

from meshwright.config.load import load
from meshwright.config.schema import RunConfig
from meshwright.prove.compare import compare
from meshwright.prove.evidence import ReferenceEvidence
from meshwright.prove.record import RankRecord, gather_evidence, record_rank
from meshwright.prove.reference import compute_reference
from meshwright.prove.result import ProofResult
from meshwright.prove.spec import as_proof
from meshwright.train import optimizer, stages, step
from meshwright.train.context import RankContext, StatusBoard
from meshwright.train.corpus import open_training_data

NUM_STEPS = 3
SMALL = (
    "model.num_layers=2",
    "model.dim=32",
    "model.ffn_dim=48",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "train.seq_len=16",
    "train.global_batch=8",
    # A step large enough that a wrong update stands out, and a norm that is clipped.
    "train.warmup_steps=1",
    "train.max_grad_norm=0.5",
)
SOURCE = str(Path(sysconfig.get_paths()["stdlib"]) / "json" / "*.py")


def small_config(*overrides: str) -> RunConfig:
    """A small Llama on the json package's source."""
    return as_proof(load("llama-tiny", [*SMALL, f"data.source={SOURCE}", *overrides]))


def record_on_rank(rank: int, world_size: int, config: RunConfig, module: str, table: str, fault: str) -> RankRecord:
    """Gang body: train as this rank, with the fault of that name in that table of that module seeded."""
    tamper = getattr(importlib.import_module(module), table)[fault].tamper if fault else None
    context = RankContext(rank, world_size, rank, world_size, None, StatusBoard([0] * StatusBoard.length(world_size)))
    corpus = open_training_data(config)
    with restored(step, stages, optimizer, dist):
        return record_rank(config, context, corpus, num_steps=NUM_STEPS, tamper=tamper)


@contextmanager
def restored(*modules: ModuleType) -> Iterator[None]:
    """Put back what a fault replaced in these modules: the gang's processes live on."""
    before = [dict(vars(module)) for module in modules]
    try:
        yield
    finally:
        for module, names in zip(modules, before, strict=True):
            vars(module).update(names)


@cache
def reference(config: RunConfig) -> ReferenceEvidence:
    """The reference of a configuration, computed once."""
    return compute_reference(config, open_training_data(config), num_steps=NUM_STEPS)


def prove_with(records: list[RankRecord], config: RunConfig) -> ProofResult:
    """What the proof concludes from the ranks' records."""
    return compare(gather_evidence(config, records), reference(config))
