"""Head and loss by chunks in whole models: proved on layouts, with the losses of all logits, without a tensor of tokens
× vocabulary, and with the memory and the collectives that plans say."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest

from meshwright.config.schema import RunConfig
from meshwright.plan.rules import load
from meshwright.prove.record.evidence import RankRecord
from meshwright.prove.spec import as_proof
from tests.gangs.gang import GangPool
from tests.helpers import covering_pairs, quick_and_slow
from tests.prove import proofs
from tests.prove.proofs import record_on_rank

EXAMPLE = Path(__file__).parents[3] / "docs/examples/own_model"
HF = ("hf-tiny", "train.seq_len=16", "train.global_batch=8")
OWN = (str(EXAMPLE / "gpt.toml"), "model.num_layers=2", "model.dim=32", "model.ffn_dim=48", *proofs.STEP)
MODELS: dict[str, tuple[str, ...]] = {
    "llama": ("llama-tiny", *proofs.SMALL),
    "moe": ("moe-tiny", *proofs.SMALL_EXPERTS, "model.z_loss=0.01"),
    **{f"hf {name}": (*HF, f"model.config={name}") for name in ("qwen3", "gemma2", "cohere")},
    "module": ("module-tiny", "model.builder=tests.features.head_loss.models:Capped", *proofs.STEP),
    "own family": OWN,
}
"""A soft cap, in gemma2 and the module; a scale, in cohere."""


@contextmanager
def importable() -> Iterator[None]:
    """The example can be imported: a rank that lives on doesn't know it."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield
    finally:
        sys.path.remove(str(EXAMPLE))


def config_of(model: str, *words: str) -> RunConfig:
    """A small run in float64."""
    preset, *sizes = MODELS[model]
    with importable():
        return as_proof(load(preset, [*sizes, f"data.source={proofs.SOURCE}", *words]))


# ---- proofs

AXES = {
    "dp_shard": "mesh.dp_shard=2",
    "tp": "mesh.tp=2",
    "tp, whole sequences": "mesh.tp=2 mesh.sequence_parallel=false mesh.dp_replicate=2",
    "zb-v": "mesh.pp=2 pipeline.schedule=zb-v train.num_microbatches=4",
    "tp, zb-h1": "mesh.pp=2 mesh.tp=2 mesh.sequence_parallel=false pipeline.schedule=zb-h1 train.num_microbatches=4",
    "cp": "mesh.cp=2",
}
MORE = {
    "": "",
    "two micro-batches": "train.num_microbatches=2",
    "documents": "data.packing=documents",
    "tied": "model.tie_embeddings=true",
    "frozen": "train.freeze=['*head*']",
    "lora": "lora.rank=2",
}
DESCRIBED = ("llama", "moe", "own family")


def is_possible(model: str, axes: str, more: str) -> bool:
    return {
        "tied": model in ("llama", "moe"),
        "frozen": model not in ("hf gemma2", "hf cohere", "own family"),  # whose head is the embedding
        "documents": model != "module",
        "lora": model.startswith("hf"),
        "two micro-batches": "pp" not in AXES[axes],
        "": True,
    }[more] and {"tp": model in ("llama", "moe"), "cp": model in DESCRIBED}.get(axes, True)


QUICK = [("llama", "tp", "two micro-batches")]
LAYOUTS = covering_pairs([case for case in product(MODELS, AXES, MORE) if is_possible(*case)], first=QUICK)


def record(rank: int, world_size: int, model: str, words: list[str]) -> RankRecord:
    with importable():
        return record_on_rank(rank, world_size, config_of(model, *words), steps=proofs.FEW_STEPS)


@pytest.mark.parametrize(("model", "axes", "more"), quick_and_slow(LAYOUTS, quick=QUICK))
def test_a_layout_is_proved(gang: GangPool, documents: str, model: str, axes: str, more: str) -> None:
    words = ["train.loss_chunk=7", *AXES[axes].split(), *MORE[more].split()]
    words += [documents] if more == "documents" else []
    words += ["model.num_layers=4"] if model in DESCRIBED and "zb-v" in axes else []
    config = config_of(model, *words)
    records = gang(config.mesh.axes().num_ranks()).run(record, model, words, timeout_s=300)
    with importable():
        proofs.assert_proved(gang, config, records)
