"""A user's own module in a file of its own is proved over every axis."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from meshwright.models.module import example
from meshwright.plan.rules import load
from meshwright.prove.report import render
from meshwright.prove.spec import as_proof
from tests.gangs.gang import GangPool
from tests.models.hf.faults import proof_of
from tests.models.module import modules
from tests.prove.proofs import SOURCE

SMALL = ("train.seq_len=16", "train.global_batch=8", "train.num_microbatches=2", f"data.source={SOURCE}")
HEADS = ("model.styles.blocks.*.[qkv]=column", "model.styles.blocks.*.out=row")
FEED_FORWARD = ("model.styles.blocks.*.up=column", "model.styles.blocks.*.down=row")
ENDS = ("model.styles.tokens=vocabulary", "model.styles.head.1=head")


def test_the_example_is_short() -> None:
    assert len(Path(str(example.__file__)).read_text("utf-8").splitlines()) <= 40


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [("mesh.tp=2", *HEADS, *FEED_FORWARD, *ENDS), ("mesh.tp=2",)],
    ids=["tp by glob", "tp by shapes"],
)
def test_the_example_is_proved(gang: GangPool, layout: tuple[str, ...]) -> None:
    config = as_proof(load("module-tiny", [*SMALL, *layout]))
    result = proof_of(gang, config)
    assert result.passed, "\n".join(render(result))


@pytest.mark.slow
def test_a_loss_of_ones_own_and_packed_documents_are_proved(gang: GangPool) -> None:
    importlib.import_module(modules.__name__)
    words = [f"model.builder={modules.__name__}:ApartModel", f"model.loss={modules.__name__}:token_losses"]
    config = as_proof(load("module-tiny", [*SMALL, *words, "data.packing=documents", "mesh.pp=2", "mesh.dp_shard=2"]))
    result = proof_of(gang, config)
    assert result.passed, "\n".join(render(result))
