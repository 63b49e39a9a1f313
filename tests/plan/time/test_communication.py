"""Times of a plan's communication against the bytes that its traffic counts, which runs are compared with.

On links without latency that nothing hides, each purpose takes its bytes over the bandwidth.
"""

from __future__ import annotations

import pytest

from meshwright.plan.run_plan import RunPlan
from meshwright.plan.stage_sizes import unit_sizes
from meshwright.plan.time.communication import Communication
from meshwright.plan.time.step_time import StepTime, predict_step
from meshwright.plan.traffic import Purpose, predict_traffic
from tests.plan.plans import LAYOUTS, plan_of
from tests.plan.time.constant_rates import SENT, constant_rates

WAITS = constant_rates(is_async=False)
MUON = "llama-tiny mesh.dp_shard=2 mesh.tp=2 train.optimizer=muon"
DIVERGING = "llama-tiny mesh.dp_replicate=2 mesh.tp=2 comm.gradients=int4"
EXPERTS = (
    "moe-tiny mesh.cp=2",
    "moe-tiny mesh.dp_shard=2 mesh.ep=2",
    "moe-tiny mesh.dp_shard=4 mesh.ep=2 mesh.tp=2 model.balance_bias=true",
    "moe-tiny mesh.dp_shard=4 mesh.ep=4 mesh.pp=2 train.num_microbatches=2",
)
MORE = (
    *EXPERTS,
    MUON,
    DIVERGING,
    "llama-tiny mesh.cp=4",
    "llama-tiny mesh.cp=2 mesh.dp_shard=2 train.num_microbatches=2",
)


def wrong_parts(plan: RunPlan, time: StepTime) -> set[str]:
    """Purposes whose time isn't that of the bytes that the rank sends. Messages between stages are in the bubble."""
    first = time.place * (plan.mesh.num_ranks() // plan.mesh.size("pp"))
    traffic = predict_traffic(plan, rank=first)
    names = set(Purpose) - {Purpose.STAGES, Purpose.OPTIMIZER}
    found = {name: (time.parts.get(name, 0.0), traffic.of(name).sent.total() / SENT) for name in names}
    return {str(name) for name, (us, expected) in found.items() if us != pytest.approx(expected, rel=1e-9, abs=1e-3)}


@pytest.mark.parametrize("words", (*LAYOUTS, *MORE))
def test_each_purpose_takes_the_time_of_its_bytes(words):
    plan = plan_of(words)
    assert wrong_parts(plan, predict_step(plan, WAITS)) == set()


def test_whole_matrices_take_the_time_of_the_rank_that_sends_the_most():
    plan = plan_of(MUON)
    times = Communication(plan, WAITS).at_end(0, list(plan.stages))
    assert times[Purpose.OPTIMIZER] == pytest.approx(predict_traffic(plan).of(Purpose.OPTIMIZER).sent.total() / SENT)


@pytest.mark.parametrize(
    ("fault", "words", "wrong"),
    [
        ("gather", "llama-tiny mesh.dp_shard=4", Purpose.WEIGHTS),
        ("reduce", "llama-tiny mesh.dp_shard=4", Purpose.GRADIENTS),
        ("of_kind", "llama-tiny mesh.tp=4 model.num_kv_heads=4", Purpose.TENSOR),
        ("of_kind", "llama-tiny mesh.cp=4", Purpose.CONTEXT),
        ("of_kind", "moe-tiny mesh.dp_shard=2 mesh.ep=2", Purpose.EXPERTS),
        ("at_end", "llama-tiny mesh.pp=2 model.tie_embeddings=true train.num_microbatches=4", Purpose.SHARED),
    ],
)
def test_communication_that_is_priced_twice_is_found(fault, words, wrong, monkeypatch):
    """A gather of a unit, its reduction, an operator's collective, an exchange of attention, a sum at the end."""
    right = getattr(Communication, fault)
    monkeypatch.setattr(Communication, fault, lambda *args: twice(right(*args)))
    plan = plan_of(words)
    assert wrong_parts(plan, predict_step(plan, WAITS)) == {str(wrong)}


def twice(times):
    """Times, or tuples or mappings of them, doubled."""
    if isinstance(times, tuple):
        return tuple(twice(one) for one in times)
    return {name: 2 * us for name, us in times.items()} if isinstance(times, dict) else 2 * times


def test_a_gather_is_priced_for_each_pass_that_gathers():
    """Blocks that stay unsharded are gathered once, and the root, which isn't freed, is never gathered again."""
    plan = plan_of("llama-tiny mesh.dp_shard=4")
    kept = plan_of("llama-tiny mesh.dp_shard=4 mesh.reshard_after_forward=false")
    blocks = sum(
        Communication(plan, WAITS).gather(one)[0]
        for one in unit_sizes(plan, plan.stages[0])
        if one.unit is not plan.stages[0].root
    )
    freed, stays = (predict_step(one, WAITS).parts[Purpose.WEIGHTS] for one in (plan, kept))
    assert freed - stays == pytest.approx(blocks)


def test_groups_that_communicate_at_once_share_a_cpus_cores():
    """Two groups of two ranks on two cores: each takes twice as long as on cores of its own."""
    plan = plan_of("llama-tiny mesh.dp_shard=2 mesh.tp=2")
    own, shared = (Communication(plan, constant_rates(is_async=False, cores=cores)) for cores in (4, 2))
    assert shared.us("all_reduce", 1000, ("tp",)) == 2 * own.us("all_reduce", 1000, ("tp",))
