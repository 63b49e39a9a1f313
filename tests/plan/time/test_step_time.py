"""Times of whole steps: parts, pipelines, what follows the last backward, intervals, and faults of the model."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from meshwright.cluster.performance import HostCosts
from meshwright.cluster.presets import cluster_preset
from meshwright.errors import ConfigError
from meshwright.pipeline.generate import generate
from meshwright.pipeline.simulate import Costs, EdgeCosts, StageCosts, simulate
from meshwright.plan.matrix_owners import operations_by_owner
from meshwright.plan.time import step_time
from meshwright.plan.time.stage_times import StagePricer
from meshwright.plan.time.step_time import predict_step
from meshwright.plan.traffic import Purpose
from tests.plan.plans import LAYOUTS, fake, plan_of
from tests.plan.time.constant_rates import FLOPS, MOVED, SENT, constant_rates

RATED = (*(words for words in LAYOUTS if "float64" not in words), "moe-tiny mesh.dp_shard=2 mesh.ep=2")
"""Presets of clusters have no rate of float64."""
PIPELINE = "llama-tiny mesh.pp={pp} train.num_microbatches={microbatches} model.num_layers=8 pipeline.schedule={name}"
PARAMETERS = 4 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384 + 2 * 128) + 2 * 256 * 128 + 128
"""Of llama-tiny."""


def is_a_sum(time):
    """Whether the parts add up to the total."""
    return math.isclose(sum(time.parts.values()), time.total, rel_tol=1e-9)


@pytest.mark.parametrize("words", RATED)
@pytest.mark.parametrize("device", ["H100", "CPU"])
def test_parts_add_up_to_the_total(words, device):
    time = predict_step(plan_of(words), cluster_preset(device))
    assert is_a_sum(time)
    assert min(time.parts.values()) >= -1e-6 * time.total
    assert 0 < time.low < time.total < time.high


def test_operations_and_tokens_of_a_model_are_known():
    """Six per token and weight of a matrix (Kaplan et al. 2020), the lookup left out, and attention's."""
    plan = plan_of("llama-tiny")
    time = predict_step(plan, constant_rates())
    products = PARAMETERS - 256 * 128 - 9 * 128
    assert time.tokens == plan.batch.global_batch * plan.batch.tokens
    assert time.parts["products"] == pytest.approx(6 * products * time.tokens / FLOPS)
    assert time.flops == pytest.approx((time.parts["products"] + time.parts["attention"]) * FLOPS)
    assert time.tokens_per_s(1) == pytest.approx(time.tokens / time.total * 1e6)


def test_an_update_moves_parameters_gradients_and_states():
    """AdamW reads four tensors and writes three; the norm reads the gradient, and clipping reads and writes it."""
    plan = plan_of("llama-tiny")
    host = HostCosts(launch_us=0.0, compiled_launch_us=0.0, parameter_us=3.0, step_us=50.0, residual=0.0)
    tensors, moved = sum(1 for stage in plan.stages for _ in plan.parameters(stage)), 4 * PARAMETERS * 10 / MOVED
    on_cpu, on_gpu = (predict_step(plan, constant_rates(host=host, is_async=is_async)) for is_async in (False, True))
    assert on_cpu.parts["optimizer"] == pytest.approx(moved + 3.0 * tensors)
    assert on_gpu.parts["optimizer"] == pytest.approx(max(moved, 3.0 * tensors))
    assert on_cpu.parts["step"] == 50.0


def test_the_rank_that_owns_the_most_matrices_bounds_their_update():
    """One owner has them all, or two share 28 that aren't all alike."""
    words = "llama-tiny train.optimizer=muon"
    alone, shared = (plan_of(words + mesh) for mesh in ("", " mesh.dp_shard=2"))
    most = max(operations_by_owner(shared, 0).values())
    assert most < sum(operations_by_owner(shared, 0).values()) < 2 * most + 1
    for plan, products in ((alone, sum(operations_by_owner(alone, 0).values())), (shared, most)):
        slow, fast = (predict_step(plan, of_products(factor)).parts["optimizer"] for factor in (1.0, 2.0))
        assert slow - fast == pytest.approx(products / FLOPS / 2)


def of_products(factor):
    """The cluster with another rate of products."""
    cluster = constant_rates(is_async=False)
    curves = {rate: replace(one, flops_per_s=factor * one.flops_per_s) for rate, one in
              cluster.performance.products.items()}  # fmt: skip
    return replace(cluster, performance=replace(cluster.performance, products=curves))


def bubble(plan, time):
    """Idle share of a pipeline of equal stages by its closed form, and that of the prediction."""
    pp, microbatches = plan.mesh.size("pp"), plan.batch.num_microbatches
    return (pp - 1) / microbatches, time.parts.get("bubble", 0.0) / (time.total - time.parts.get("bubble", 0.0))


@pytest.mark.parametrize("name", ["1f1b", "f-then-b"])
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (4, 8), (8, 8)])
def test_the_bubble_is_that_of_the_closed_form(name, pp, microbatches, monkeypatch):
    """(p − 1) / m of the work (Narayanan et al. 2021, section 2.2), if stages are equal and messages take no time."""
    monkeypatch.setattr(StagePricer, "times", equal_stage(StagePricer.times))
    plan = plan_of(PIPELINE.format(pp=pp, microbatches=microbatches, name=name))
    expected, found = bubble(plan, predict_step(plan, alone()))
    assert found == pytest.approx(expected, rel=1e-6)


def alone():
    """A cluster whose links and memory take no time, so that a step has nothing but its pipeline."""
    cluster = constant_rates()
    links = {name: replace(getattr(cluster, name), bandwidth_bytes_per_s=1e30) for name in
             ("inside_node", "between_nodes", "between_pods")}  # fmt: skip
    return replace(cluster, device=replace(cluster.device, memory_bandwidth_bytes_per_s=1e30), **links)


def equal_stage(times):
    """Price each stage as the second one, whose blocks have neither embedding nor head."""
    return lambda self, number: times(self, 1 if len(self._plan.stages) > 2 else 0)


def test_messages_between_stages_lengthen_a_pipeline():
    plan = plan_of("llama-tiny mesh.pp=2 train.num_microbatches=1")
    near, far = (predict_step(plan, constant_rates(latency_us=us)) for us in (0.0, 1000.0))
    sent = 4 * math.prod(plan.edge.shape) * plan.batch.samples / SENT
    fast = predict_step(plan, alone())
    work = near.total - near.parts["bubble"], fast.total - fast.parts["bubble"]
    assert far.total - near.total >= 2 * 1000.0
    assert near.total - fast.total >= 2 * sent + (work[0] - work[1]) - 1e-6


def test_processes_that_share_cores_take_their_work_over_the_cores():
    plan = plan_of("llama-tiny mesh.dp_replicate=4")
    own, shared = (predict_step(plan, constant_rates(is_async=False, cores=cores)) for cores in (4, 2))
    for name in ("products", "attention", "memory", "optimizer"):
        assert shared.parts[name] == pytest.approx(2 * own.parts[name])
    assert is_a_sum(shared)


def test_cores_that_share_their_units_gain_nothing_by_a_pipeline():
    plan = plan_of("llama-tiny mesh.pp=2 train.num_microbatches=4")
    alone = predict_step(plan_of("llama-tiny train.num_microbatches=4"), constant_rates(is_async=False, cores=2))
    rates = constant_rates(is_async=False, cores=2)
    twice = dict.fromkeys(("products", "attention", "memory", "host"), 2.0)
    rates = replace(rates, performance=replace(rates.performance, shared=twice))
    names = ("products", "attention", "memory")
    shared = predict_step(plan, rates)
    own = sum(shared.parts.get(name, 0.0) for name in (*names, "bubble", "cores", "stages"))
    assert own == pytest.approx(sum(alone.parts[name] for name in names), rel=0.05)


def test_the_interval_is_that_of_independent_parts():
    plan = plan_of("llama-tiny")
    time = predict_step(plan, constant_rates(residual=0.1))
    names = ("products", "attention", "memory", "optimizer")
    deviation = math.sqrt(sum((0.1 * time.parts[name]) ** 2 for name in names)) / time.total
    assert math.log(time.high / time.total) == pytest.approx(deviation)
    assert math.log(time.total / time.low) == pytest.approx(deviation)


def test_blocks_without_operators_are_an_error():
    with pytest.raises(ConfigError, match="block"):
        predict_step(fake(), constant_rates())


def test_a_place_that_ends_early_reduces_its_gradients_meanwhile():
    """The first place ends last, so that it is the one whose reductions count."""
    plan = plan_of("llama-tiny mesh.pp=2 mesh.dp_shard=2 train.num_microbatches=4")
    time = predict_step(plan, constant_rates())
    ends = [max(one.end for one in time.timeline.of_rank(place)) for place in (0, 1)]
    assert ends[0] > ends[1] and time.place == 0
    assert time.total == pytest.approx(max(end + sum(own.values()) for end, own in zip(ends, time.at_end, strict=True)))
    assert sum(time.at_end[0].values()) < sum(time.at_end[1].values())


class TestFaults:
    """Faults of the model, each found by what the tests above compare. Communication that is priced twice is in
    `test_communication`, and the memory of a stage that is missing in `tests/plan/test_memory.py`."""

    def test_an_overlap_where_a_stream_cannot(self, monkeypatch):
        """Nothing runs beside a CPU's kernels: all gathers and reductions are exposed."""
        plan, cluster = plan_of("llama-tiny mesh.dp_shard=2"), constant_rates(is_async=False)
        right = predict_step(plan, cluster).parts
        monkeypatch.setattr(StagePricer, "_hides", lambda self: True)
        wrong = predict_step(plan, cluster).parts
        fewer = {name for name in right if wrong.get(name, 0.0) < right[name] - 1e-6}
        assert fewer == {Purpose.WEIGHTS, Purpose.GRADIENTS}

    def test_a_forgotten_bubble(self, monkeypatch):
        plan = plan_of(PIPELINE.format(pp=4, microbatches=8, name="1f1b"))
        monkeypatch.setattr(step_time, "_last_ends", lambda found: list(found.busy))
        expected, found = bubble(plan, predict_step(plan, alone()))
        assert found < expected / 10

    def test_a_forgotten_stage(self, monkeypatch):
        """The operations of all places of the pipeline are those of the model."""
        plan = plan_of(PIPELINE.format(pp=4, microbatches=8, name="interleaved") + " pipeline.chunks=2")
        whole = predict_step(plan_of("llama-tiny model.num_layers=8"), constant_rates())
        stages = predict_step(plan, constant_rates()).stages
        assert sum(one.flops for one in stages) * plan.batch.num_microbatches == pytest.approx(whole.flops)
        assert sum(one.flops for one in stages[1:]) * plan.batch.num_microbatches < 0.9 * whole.flops


@pytest.mark.parametrize("slowest", [0, 3])
def test_further_micro_batches_of_uneven_stages_take_as_long_as_the_slowest(slowest):
    """The first stage of ZB-H1 starts micro-batches faster than a slow last one ends them."""
    times = [StageCosts(*((13.0, 15.0, 10.0) if stage == slowest else (10.0, 12.0, 8.0))) for stage in range(4)]
    few, many = (
        simulate(generate("zb-h1", num_stages=4, num_microbatches=number), Costs(times, [EdgeCosts()] * 3))
        for number in (8, 80)
    )
    assert few.makespan + 72 * step_time._period(few, 4, 6) == pytest.approx(many.makespan, rel=0.01)
