"""Sums of buffer updates, rows of load counters, the bytes that both send, and counts of parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.plan.run_plan import Buffer
from meshwright.plan.stage_sizes import buffer_sums, experts_per_layer, load_rows, num_params, replicated_note
from meshwright.plan.traffic import LinkBytes, Purpose, predict_traffic
from tests.plan.plans import fake, plan_of, with_kind

DATA = ("dp_shard",)
LOAD = Buffer("router.load.value", (6,), "int64", work=DATA, summed=DATA, load=True)
SEEN = Buffer("seen.value", (3, 2), "int64", work=DATA, summed=DATA)
MEAN = Buffer("mean.value", (5,), "float32", work=DATA, summed=DATA)
ROTARY = Buffer("rotary", (7,), "float32")


def routed(*buffers, **mesh):
    """A plan whose blocks have these buffers."""
    return with_kind(fake(**mesh), "block", buffers=buffers)


def test_integers_share_a_sum_and_floats_have_their_own():
    plan = routed(LOAD, ROTARY, MEAN, SEEN, dp_shard=2, pp=2)
    first, *means = buffer_sums(plan, 0)
    num_layers = len(plan.stages[0].kinds)
    assert first.buffers == tuple((0, f"blocks.{n}.{one.name}") for n in range(num_layers) for one in (LOAD, SEEN))
    assert (first.axes, first.dtype, first.elements) == (DATA, "int64", num_layers * (6 + 6))
    assert [one.buffers for one in means] == [((0, f"blocks.{n}.mean.value"),) for n in range(num_layers)]
    assert {(one.dtype, one.elements) for one in means} == {("float32", 5)}
    assert {site[0] for site in buffer_sums(plan, 2)[0].buffers} == {1}


def test_other_axes_have_another_sum():
    over_tp = replace(SEEN, work=("dp_shard", "tp"), summed=("dp_shard", "tp"))
    found = buffer_sums(routed(LOAD, over_tp, dp_shard=2, tp=2), 0)
    assert [(one.axes, one.elements) for one in found] == [(DATA, 4 * 6), (("dp_shard", "tp"), 4 * 6)]


def test_nothing_is_summed_where_nothing_is_divided():
    plan = routed(replace(LOAD, work=(), summed=()), ROTARY, pp=2)
    assert buffer_sums(plan, 0) == () and len(load_rows(plan)) == 4


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_rows_are_those_of_all_stages(pp):
    plan = routed(LOAD, SEEN, pp=pp)
    rows = load_rows(plan)
    assert [row.layer for row in rows] == [0, 1, 2, 3]
    stages = [number for number, stage in enumerate(plan.stages) for _ in stage.kinds]
    assert [row.site for row in rows] == [(stages[n], f"blocks.{n}.router.load.value") for n in range(4)]
    assert experts_per_layer(rows) == {f"layer {n}": 6 for n in range(4)}
    assert load_rows(fake(pp=pp)) == ()


def test_two_counters_of_a_layer_are_told_apart():
    rows = load_rows(routed(LOAD, replace(LOAD, name="keys.load.value", shape=(3,))))
    assert list(experts_per_layer(rows).items())[:2] == [("blocks.0.router.load", 6), ("blocks.0.keys.load", 3)]


def test_a_counter_on_every_stage_is_one_row():
    plan = with_kind(fake(pp=2), "embed", buffers=(replace(LOAD, name="load.value"),))
    plan = replace(plan, stages=tuple(replace(stage, before=("embed",)) for stage in plan.stages))
    (row,) = load_rows(plan)
    assert row.site == (0, "load.value") and row.layer is None
    assert experts_per_layer((row,)) == {"load": 6}


def test_bytes():
    """Over dp_shard the counts of this rank's layers, over pp those of all layers; a ring sends a part twice."""
    for pp in (1, 2, 4):
        plan = routed(LOAD, dp_shard=2, pp=pp)
        for rank in range(2 * pp):
            num_layers = len(plan.stages[rank // 2].kinds)
            sent = 2 * 8 * (num_layers * 6 // 2 + (pp - 1) * 4 * 6 // pp)
            found = predict_traffic(plan, rank=rank).of(Purpose.BUFFERS)
            assert found.sent == found.exact == LinkBytes(sent)


@pytest.mark.parametrize("layout", ["", " mesh.tp=2", " mesh.pp=2 mesh.dp_shard=2"])
def test_every_layout_has_as_many_parameters(layout: str) -> None:
    width, ffn, vocabulary, layers = 128, 384, 256, 4
    block = 3 * width * width + 3 * width * ffn + 2 * width  # half as many heads of keys and of values
    assert num_params(plan_of(f"llama-tiny{layout}")) == layers * block + 2 * vocabulary * width + width


def test_what_stays_replicated_is_said() -> None:
    """The example's attention has no style by itself."""
    [said] = replicated_note(plan_of("module-tiny mesh.tp=2"))
    assert said.startswith("tp shards 50 % of the parameters")
    for words in ("module-tiny", "module-tiny mesh.dp_shard=2", "llama-tiny mesh.tp=2"):
        assert replicated_note(plan_of(words)) == ()
