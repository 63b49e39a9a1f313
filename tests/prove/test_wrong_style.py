"""A style that is wrong, so that the sum it calls for is left out too: no plan can know, and a proof finds it."""

from __future__ import annotations

import sys
from contextlib import contextmanager
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

NORMS = "attention.[qk]_norm"
EXAMPLE = Path(__file__).parents[2] / "docs/examples/own_model"
WORDS = ("model.num_layers=1", "model.dim=16", "model.ffn_dim=16", "train.seq_len=8", "train.global_batch=4",
         "mesh.tp=2")  # fmt: skip


@contextmanager
def example(words, *, is_wrong):
    """The example's configuration; where its styles are wrong, norms of queries and keys are those of modules that
    nothing divides, whose gradients are taken for the whole ones on every rank."""
    with mock.patch.object(sys, "path", [str(EXAMPLE), *sys.path]):
        from parallel_gpt import family

        block = {path: style for path, style in family.STYLES["block"].items() if not is_wrong or path != NORMS}
        # Plans are made once for a configuration, which says nothing of styles.
        forget_plans = make_plan.__globals__["_make_plan"].cache_clear
        with mock.patch.object(family, "STYLES", {**family.STYLES, "block": block}):
            forget_plans()
            try:
                yield as_proof(load(str(EXAMPLE / "gpt.toml"), words))
            finally:
                forget_plans()


def body(rank, world_size, words, is_wrong):
    with example(words, is_wrong=is_wrong) as config:
        return record_on_rank(rank, world_size, config)


@pytest.mark.slow
def test_a_wrong_style_passes_verify_and_fails_the_proof(gang, tmp_path):
    words = [*WORDS, *small_corpus(tmp_path)]
    with example(words, is_wrong=True) as config:
        plan = make_plan(config)
        verify(plan)
    block = next(kind for kind in plan.kinds if kind.is_block)
    norm = next(p for p in block.parameters if p.name == "attention.q_norm.weight")
    assert norm.gradient("tp") is GradientPlacement.EQUAL
    assert not any("q_norm" in str(one.parameters) for one in plan.sums)
    with example(words, is_wrong=False) as config:
        right, wrong = (prove_with(gang(2).run(body, words, is_wrong), config) for is_wrong in (False, True))
    assert right.passed and not wrong.passed
    said = " ".join(" ".join(render(wrong)).split())
    assert "blocks.0.attention.q_norm.weight" in said and "blocks.0.attention.wq.weight" not in said
