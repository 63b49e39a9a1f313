"""Prices in closed form against the plan that a run has."""

from __future__ import annotations

import math

import pytest

from meshwright.cluster.presets import cluster_preset
from meshwright.config.load import load
from meshwright.plan.cuda_memory import predict_cuda_memory
from meshwright.plan.make_plan import make_plan
from meshwright.plan.search import price
from meshwright.plan.search.finalist import finalist
from meshwright.plan.search.layout import Inner, Layout
from meshwright.plan.search.price import Pricer
from meshwright.plan.search.probes import Shards
from meshwright.plan.time.step_time import predict_step

INNER = Inner(sequence_parallel=False, compiled=True)
LAYOUTS = {
    "fsdp": Layout(INNER, dp_shard=8, num_microbatches=2),
    "hsdp kept": Layout(
        INNER._replace(recompute="full"), dp_replicate=2, dp_shard=4, num_microbatches=2, reshard=False
    ),
    "one micro-batch": Layout(INNER._replace(samples=2), dp_shard=8),
    "tp": Layout(Inner(tp=4, samples=2, recompute="selective"), dp_shard=2, num_microbatches=4),
    "cp": Layout(INNER._replace(cp=2, recompute="full"), dp_shard=4, num_microbatches=4),
    "pp": Layout(INNER._replace(tp=2, sequence_parallel=True), pp=4, num_microbatches=16),
    "interleaved": Layout(INNER, pp=2, dp_shard=4, num_microbatches=4, schedule="interleaved", chunks=3),
    "zb-h1": Layout(Inner(tp=2), pp=4, num_microbatches=16, schedule="zb-h1"),
    "zb-v": Layout(Inner(tp=2), pp=4, num_microbatches=16, schedule="zb-v", chunks=2),
}
EXPERTS = Layout(INNER._replace(ep=4), dp_shard=8, num_microbatches=2)


def base_of(preset):
    return load(preset, ["train.global_batch=16", "train.seq_len=2048"], rules=lambda *_: iter(()))


@pytest.fixture(scope="module")
def exact():
    """Finalists on a cluster on which all fit."""
    base, cluster, found = base_of("llama3-8b"), cluster_preset("H100"), {}
    pricer = Pricer(base, cluster)
    pricer.capacity = math.inf
    for name, layout in LAYOUTS.items():
        found[name] = finalist(base, cluster, layout, pricer)
    return found


@pytest.fixture
def pricer():
    return Pricer(base_of("llama3-8b"), cluster_preset("H100"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_memory(name, exact, pricer):
    found = pricer.num_bytes(LAYOUTS[name])
    assert 0.995 * exact[name].num_bytes <= found <= 1.03 * exact[name].num_bytes


@pytest.mark.parametrize("name", LAYOUTS)
def test_state_by_type(name, exact, pricer):
    found, _ = pricer.memory(LAYOUTS[name])
    for kind in ("parameters", "optimizer"):
        assert getattr(found, kind) == pytest.approx(getattr(exact[name].memory, kind), rel=0.01)


@pytest.mark.parametrize("name", LAYOUTS)
def test_time(name, exact, pricer):
    assert pricer.time(LAYOUTS[name]) == pytest.approx(exact[name].step.total, rel=0.08)


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_step_is_under_the_least_time(name, pricer):
    assert pricer.least_time(LAYOUTS[name]) <= pricer.time(LAYOUTS[name])


def test_experts_are_sharded_by_their_own_axis():
    base, cluster = base_of("mixtral-8x7b"), cluster_preset("H100")
    pricer = Pricer(base, cluster)
    pricer.capacity = math.inf
    found = finalist(base, cluster, EXPERTS, pricer)
    assert pricer.num_bytes(EXPERTS) == pytest.approx(found.num_bytes, rel=0.03)
    assert pricer.time(EXPERTS) == pytest.approx(found.step.total, rel=0.1)


@pytest.mark.parametrize("name", ["fsdp", "pp"])
def test_tied_embeddings_are_held_once_by_a_lone_stage(name):
    pricer = Pricer(base_of("llama3-8b").with_keys({"model.tie_embeddings": True}), cluster_preset("H100"))
    pricer.capacity = math.inf
    found, (memory, _) = (finalist(pricer.base, pricer.cluster, LAYOUTS[name], pricer), pricer.memory(LAYOUTS[name]))
    assert memory.parameters == pytest.approx(found.memory.parameters, rel=0.001)
    assert memory.optimizer == pytest.approx(found.memory.optimizer, rel=0.001)


def test_a_forgotten_first_stage_is_found(exact, pricer):
    """The embedding's rank holds the most."""
    pricer._contents = lambda *key: tuple(one for one in pricer._make_contents(*key) if not one[0].has_first)
    assert pricer.num_bytes(LAYOUTS["pp"]) < 0.995 * exact["pp"].num_bytes


def test_free_gathers_are_found(exact, pricer, monkeypatch):
    pricer_ratio = pricer.time(LAYOUTS["fsdp"]) / exact["fsdp"].step.total
    monkeypatch.setattr(price.Pricer, "_shards", lambda self, layout: [Shards(0.0, 0.0, 0.0, 0.0, 0.0)])
    ratio = pricer.time(LAYOUTS["fsdp"]) / exact["fsdp"].step.total
    assert ratio < pricer_ratio - 0.01


def test_uneven_chunks_hold_unevenly_many():
    pricer = Pricer(base_of("llama3-70b"), cluster_preset("H100"))
    layout = Layout(Inner(tp=8), 8, num_microbatches=32, schedule="zb-v", chunks=2)
    shares = [one.uneven for one, _ in pricer.contents(layout)]
    assert max(shares) > 1.1 and min(shares) >= 0.9


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v", "v-half", "v-min"])
def test_finalists_are_simulated_with_fewer_micro_batches(name):
    """They take as long as all micro-batches do, and as much memory."""
    pricer = Pricer(base_of("llama3-8b").with_keys({"train.global_batch": 40}), cluster_preset("H100"))
    pricer.capacity = math.inf
    inner = Inner(tp=2, compiled=name in ("1f1b", "interleaved"))
    layout = Layout(inner, pp=4, num_microbatches=40, schedule=name, chunks=1 + (name not in ("1f1b", "zb-h1")))
    found = finalist(pricer.base, pricer.cluster, layout._replace(reshard=False), pricer)
    plan = make_plan(found.config, nodes=8)
    whole = predict_step(plan, pricer.cluster)
    assert len(found.step.timeline.spans) < len(whole.timeline.spans)
    assert found.step.total == pytest.approx(whole.total, rel=0.01)
    assert sum(found.step.parts.values()) == pytest.approx(found.step.total)
    assert found.step.tokens == whole.tokens and found.step.flops == pytest.approx(whole.flops)
    assert found.num_bytes == predict_cuda_memory(plan).total()
