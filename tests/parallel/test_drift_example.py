"""Without the sum of their gradients copies come apart at once, with it never, as the example of the docs draws."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshwright.pipeline.actions import ActionKind
from meshwright.plan.make_plan import lowered_table
from meshwright.plan.rules import load
from tests.helpers import rank_context
from tests.prove.proofs import SMALL, SOURCE

EXAMPLE = Path(__file__).parents[2] / "docs/examples/shared_drift.py"
STEPS = 4
DIT = ("dit-digits", ("mesh.pp=2", "pipeline.chunks=2", "model.dim=16", "model.ffn_dim=24", "model.zero_init=false",
                      "train.global_batch=8", "train.warmup_steps=1", "train.device=cpu"))  # fmt: skip
TIED = ("llama-tiny", (*SMALL, f"data.source={SOURCE}", "mesh.pp=2", "model.tie_embeddings=true"))


def example() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


def drift_on_rank(rank, world_size, config):
    context = rank_context(rank, world_size)
    return example().train_twice(config, context, num_steps=STEPS)


def drifts(gang, num_ranks, source, words):
    return gang(num_ranks).run(drift_on_rank, load(source, words))


def test_copies_come_apart_without_the_sum_and_only_then(gang, tmp_path):
    source, words = TIED
    first, *others = drifts(gang, 2, source, words)
    assert others == [first], "all ranks see the same"
    (losses, apart), (others_losses, others_apart) = first.values()
    assert apart == [0.0] * STEPS and 0 < others_apart[0] < others_apart[-1]
    assert losses[0] == others_losses[0]
    assert losses[-1] == pytest.approx(others_losses[-1], rel=0.05), "nobody would notice"
    example().draw(first, tmp_path / "a.svg", "nats")
    picture = (tmp_path / "a.svg").read_text("utf-8")
    assert all(part in picture for part in ("exactly 0, bitwise equal", f"without: {others_apart[-1]:.1%} apart"))


@pytest.mark.slow
def test_shards_of_copies_are_as_far_apart_as_the_whole(gang):
    source, words = DIT
    [whole, *_] = drifts(gang, 2, source, words)
    [shards, *_] = drifts(gang, 4, source, (*words, "mesh.dp_shard=2"))
    assert shards["with SYNC_SHARED"][1] == [0.0] * STEPS and whole["without"][1][0] > 0
    assert shards["without"][1] == pytest.approx(whole["without"][1], rel=1e-3)


def test_nothing_but_the_sum_is_left_out():
    table = lowered_table(load(*DIT))
    rows = zip(table.actions, example().without_sync(table).actions, strict=True)
    for before, after in rows:
        [left_out] = [action for action in before if action not in after]
        assert left_out.kind is ActionKind.SYNC_SHARED and len(after) == len(before) - 1
