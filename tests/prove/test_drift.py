"""Without the sum of their gradients copies come apart at once, with it never; what can't drift is refused at once."""

from __future__ import annotations

import pytest

from meshwright.errors import LayoutError
from meshwright.pipeline.actions import ActionKind
from meshwright.plan.pipeline_table import lowered_table
from meshwright.prove.drift.draw import draw_drift
from meshwright.prove.drift.experiment import DEFAULT_LAYOUT, load_sharing
from meshwright.prove.drift.record import train_twice, without_sync
from meshwright.prove.drift.result import DriftCurve, DriftResult, as_json, from_json
from meshwright.train.launch.rank_context import RankContext, StatusBoard
from tests.helpers import alternatives, open_data
from tests.prove.proofs import SMALL, SOURCE

STEPS = 4
DIT = ("dit-digits", ("mesh.pp=2", "pipeline.chunks=2", "model.dim=16", "model.ffn_dim=24", "model.zero_init=false",
                      "train.global_batch=8", "train.warmup_steps=1"))  # fmt: skip
TIED = ("llama-tiny", (*SMALL, f"data.source={SOURCE}", "mesh.pp=2", "model.tie_embeddings=true"))


def drift_on_rank(rank, world_size, config, corpus):
    board = StatusBoard([0] * StatusBoard.length(world_size))
    context = RankContext(rank, world_size, rank, world_size, None, board)
    return train_twice(config, context, corpus, num_steps=STEPS)


def drifts(gang, num_ranks, source, words):
    config = load_sharing(source, words)
    return gang(num_ranks).run(drift_on_rank, config, open_data(config))


def test_copies_come_apart_without_the_sum_and_only_then(gang):
    source, words = TIED
    first, *others = drifts(gang, 2, source, words)
    assert others == [first], "all ranks see the same"
    assert first.synced.distances == (0.0,) * STEPS
    assert 0 < first.unsynced.distances[0] < first.unsynced.distances[-1]
    assert first.unsynced.losses[0] == first.synced.losses[0]
    assert first.unsynced.losses[-1] == pytest.approx(first.synced.losses[-1], rel=0.05), "nobody would notice"
    assert drifts(gang, 2, source, words)[0] == first, "the same command, the same curves"


@pytest.mark.slow
def test_shards_of_copies_are_as_far_apart_as_the_whole(gang):
    source, words = DIT
    [whole, *_] = drifts(gang, 2, source, words)
    [shards, *_] = drifts(gang, 4, source, (*words, "mesh.dp_shard=2"))
    assert shards.synced.distances == (0.0,) * STEPS and whole.unsynced.distances[0] > 0
    assert shards.unsynced.distances == pytest.approx(whole.unsynced.distances, rel=1e-3)


def test_nothing_but_the_sum_is_left_out():
    table = lowered_table(load_sharing(*DIT))
    rows = zip(table.actions, without_sync(table).actions, strict=True)
    for before, after in rows:
        [left_out] = [action for action in before if action not in after]
        assert left_out.kind is ActionKind.SYNC_SHARED and len(after) == len(before) - 1


def test_the_default_and_a_preset_without_words():
    assert load_sharing(None, ()).mesh.pp == 2 == load_sharing(None, ()).pipeline.chunks
    assert load_sharing(None, ("mesh.pp=4",)).name == DEFAULT_LAYOUT[0]
    assert load_sharing("dit-xl-2", ("mesh.pp=2", "mesh.dp_shard=4")).train.device == "cpu"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("dit-digits", ()),
        (None, ("mesh.dp_shard=2",)),
        ("llama-tiny", ()),
        ("llama-tiny", ("mesh.pp=2",)),
        ("llama-tiny", ("model.tie_embeddings=true",)),
        ("llama-tiny", ("pipeline.chunks=2", "pipeline.schedule=interleaved")),
        ("llama-tiny", ("train.num_microbatches=1",)),
    ],
)
def test_what_shares_nothing_is_refused_with_a_fix_that_works(source, words):
    with pytest.raises(LayoutError) as caught:
        load_sharing(source, words)
    [way] = alternatives(caught.value.fix)
    assert load_sharing(source, [*words, *way])


def test_a_layout_that_no_word_helps_names_one_that_works():
    with pytest.raises(LayoutError) as caught:
        load_sharing("llama-tiny", ("mesh.pp=1", "model.tie_embeddings=false", "model.num_layers=1"))
    _, _, _, source, *words = caught.value.fix.split()
    assert load_sharing(source, words)


SEEN = DriftResult(
    DriftCurve((1.0, 0.9, 0.8), (0.0, 0.0, 0.0)), DriftCurve((1.0, 0.9, 0.81), (0.0, 2e-5, 0.3)), "squared error"
)


@pytest.mark.parametrize("name", ["a.svg", "a.png"])
def test_pictures(tmp_path, name):
    assert from_json(as_json(SEEN)) == SEEN
    draw_drift(SEEN, tmp_path / name, title="copies\nof a tiny model")
    picture = (tmp_path / name).read_bytes()
    assert picture.startswith((b"<?xml", b"\x89PNG"))
    if name == "a.svg":
        words = picture.decode()
        assert all(part in words for part in ("exactly 0, bitwise equal", "without: 30.0% apart", "0.001%", "100%"))


def test_curves_of_one_step_and_of_zeros_are_drawn(tmp_path):
    flat = DriftCurve((1.0,), (0.0,))
    draw_drift(DriftResult(flat, flat, "nats"), tmp_path / "a.svg", title="flat")
    assert (tmp_path / "a.svg").stat().st_size > 1000
