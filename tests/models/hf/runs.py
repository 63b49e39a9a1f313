"""Runs of tiny models of transformers, on the standard library's source."""

from __future__ import annotations

from pathlib import Path

from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.models.contract.run_facts import RunFacts
from meshwright.models.foreign.structure import Structure
from meshwright.models.hf.family import structure_of
from meshwright.plan.load_config import load
from tests.prove.proofs import SOURCE

SETTINGS = ("train.seq_len=32", "train.global_batch=8", "train.num_microbatches=2", f"data.source={SOURCE}")


def hf_config(model: str, *words: str, cache: Path | None = None) -> RunConfig:
    """The configuration of a run of a model type, or of a folder."""
    where = () if cache is None else (f"data.cache_dir={cache}",)
    return load("hf-tiny", [f"model.config={model}", *SETTINGS, *where, *words])


def hf_facts(model: str, *words: str, cache: Path | None = None) -> RunFacts:
    """Return what the family is told of such a run."""
    return run_facts(hf_config(model, *words, cache=cache))


def hf_structure(model: str, *words: str, cache: Path | None = None) -> Structure:
    """The structure of its model."""
    return structure_of(hf_facts(model, *words, cache=cache))
