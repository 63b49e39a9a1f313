"""A style that is wrong, so that the sum it calls for is left out too: no plan can know, and a proof finds it."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest

from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.plan.run_plan import GradientPlacement
from meshwright.plan.verify import verify
from meshwright.prove.report import render
from meshwright.prove.spec import as_proof
from tests.helpers import small_corpus
from tests.prove.proofs import prove_with, record_on_rank

EXAMPLE = Path(__file__).parents[2] / "docs/examples/own_model"
WORDS = ("model.num_layers=1", "model.dim=16", "model.ffn_dim=16", "train.seq_len=8", "train.global_batch=4",
         "mesh.tp=2")  # fmt: skip


def wrong_styles():
    """The example's styles, where norms of queries and keys are taken for replicated modules."""
    from parallel_gpt import family

    block = {path: style for path, style in family.STYLES["block"].items() if path != "attention.[qk]_norm"}
    # As a module that nothing divides would be: its gradient is taken for the whole one on every rank.
    return mock.patch.object(family, "STYLES", {**family.STYLES, "block": block})


def body(rank, world_size, words, is_wrong):
    with mock.patch.object(sys, "path", [str(EXAMPLE), *sys.path]), ExitStack() as patches:
        if is_wrong:
            patches.enter_context(wrong_styles())
        forget_plans()
        config = as_proof(load(str(EXAMPLE / "gpt.toml"), words))
        try:
            return record_on_rank(rank, world_size, config)
        finally:
            forget_plans()


def forget_plans():
    """Plans are made once for a configuration, which says nothing of styles."""
    make_plan.__globals__["_make_plan"].cache_clear()


@pytest.mark.slow
def test_a_wrong_style_passes_verify_and_fails_the_proof(gang, tmp_path):
    words = [*WORDS, *small_corpus(tmp_path)]
    with mock.patch.object(sys, "path", [str(EXAMPLE), *sys.path]):
        config = as_proof(load(str(EXAMPLE / "gpt.toml"), words))
        forget_plans()
        with wrong_styles():
            plan = make_plan(config)
        forget_plans()
        verify(plan)
        block = next(kind for kind in plan.kinds if kind.is_block)
        norm = next(p for p in block.parameters if p.name == "attention.q_norm.weight")
        assert norm.gradient("tp") is GradientPlacement.EQUAL and not any(
            "q_norm" in str(one.parameters) for one in plan.sums
        )
        right, wrong = (prove_with(gang(2).run(body, words, is_wrong), config) for is_wrong in (False, True))
    assert right.passed and not wrong.passed
    said = " ".join(" ".join(render(wrong)).split())
    assert "blocks.0.attention.q_norm.weight" in said and "blocks.0.attention.wq.weight" not in said
