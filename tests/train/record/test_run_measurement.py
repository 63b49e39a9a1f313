"""Measured steps compute what others do, and count what the plan predicts."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from meshwright.comm.collective_log import count_collectives
from meshwright.comm.private import COLLECTIVES
from meshwright.parallel.data_parallel import fsdp_modules
from meshwright.plan.traffic import predict_traffic
from meshwright.train.record.run_measurement import MEASURED_STEPS, measured_steps
from tests.train.jobs import load_words, make_job, make_plan, pieces


def measured(rank, world_size, words):
    """What was measured of steps 2 and 3, and what three steps compute with and without measuring."""
    functions = collectives()
    job, step = make_job(rank, world_size, words)
    step.measure(frozenset({2, 3}), base_bytes=1000)
    results = [step(number) for number in (1, 2, 3)]
    facts = step.measurement.gather()
    assert collectives() == functions, "what counts collectives stays installed"
    other, plain = make_job(rank, world_size, words)
    assert results == [plain(number) for number in (1, 2, 3)]
    there = pieces(other)
    for name, piece in pieces(job).items():
        assert torch.equal(piece.values, there[name].values), name
    return facts


def collectives():
    names = [name for names in COLLECTIVES.values() for name in names]
    return [getattr(module, name, None) for module in (dist, functional) for name in names]


LAYOUTS = [
    (4, ["mesh.dp_shard=2", "mesh.pp=2", "train.num_microbatches=4", "model.tie_embeddings=true"]),
    pytest.param(2, ["dit-digits", "data.source=digits", "mesh.tp=2", "train.global_batch=8"], marks=pytest.mark.slow),
    pytest.param(4, ["mesh.dp_shard=4", "comm.ranks_per_node=2", "comm.gradients=loco4", "comm.weights=int8"],
                 marks=pytest.mark.slow),
    pytest.param(2, ["moe-tiny", "mesh.cp=2", "model.balance_loss=0.02", "recompute.policy=full"],
                 marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "words"), LAYOUTS)
def test_a_measured_step_is_the_same_step_and_sends_what_is_predicted(gang, corpus, world_size, words):
    words = words if "data.source=digits" in words else [*words, *corpus]
    plan = make_plan(load_words(words))
    for facts in gang(world_size).run(measured, words, timeout_s=60):
        assert facts.steps == (2, 3)
        assert sum(one.predicted.total() for one in facts.sent) == predict_traffic(plan).sent().total()
        for one in facts.sent:
            assert one.counted == one.predicted, one
        for parts in facts.parts:
            assert min(vars(parts).values()) >= 0 and parts.compute > 0
        first = range(plan.mesh.num_ranks() // plan.mesh.size("pp"))
        held = [facts.memory[rank] for rank in first]
        assert all(one["parameters"] >= one["gradients"] > 0 and one["peak"] > one["base"] for one in held)
        by_stage = [len(facts.measured.of_rank(rank)) for rank in range(plan.mesh.size("pp"))]
        assert by_stage == [len(facts.predicted.of_rank(rank)) for rank in range(plan.mesh.size("pp"))]


def forgets(rank, world_size, words):
    """Counted bytes of a step in which FSDP2 gathers once more than planned."""
    _, step = make_job(rank, world_size, words)
    step.measure(frozenset({2}), base_bytes=0)
    step(1)
    module = fsdp_modules(step._job.model)[0]
    original = step.update

    def update(number, loss):
        with step.measurement.counting():
            module.unshard()
            module.reshard()
        return original(number, loss)

    with mock.patch.object(step, "update", update):
        step(2)
    facts = step.measurement.gather()
    return {one.purposes: (one.counted.total(), one.predicted.total()) for one in facts.sent}


def stops(rank, world_size, words):
    """What was measured of a run that stops before the last step that it would measure."""
    _, step = make_job(rank, world_size, words)
    step.measure(frozenset({2, 9}), base_bytes=0)
    step(1)
    step(2)
    return step.measurement.gather()


def test_a_run_that_stops_early_has_times_but_no_counts(gang, corpus):
    for facts in gang(2).run(stops, ["mesh.dp_shard=2", *corpus]):
        assert facts.steps == (2,) and facts.sent is None and facts.parts[0].compute > 0


def test_a_gather_that_is_not_planned_is_seen(gang, corpus):
    for found in gang(2).run(forgets, ["mesh.dp_shard=2", *corpus]):
        counted, predicted = found[("weights",)]
        assert counted > predicted
        counted, predicted = found[("gradients",)]
        assert counted == predicted


def fails(rank, world_size):
    before = collectives()
    with pytest.raises(RuntimeError), count_collectives() as found:
        dist.all_reduce(torch.ones(10))
        raise RuntimeError
    return collectives() == before, dict(found)


def test_collectives_are_restored_after_an_error(gang):
    for restored, found in gang(2).run(fails):
        assert restored and found == {("all_reduce", (0, 1)): 2 * 5 * 4}


def test_measured_steps_are_spread_and_leave_out_the_first():
    assert measured_steps(range(1, 2)) == {1}
    assert measured_steps(range(1, 4)) == {2, 3}
    assert measured_steps(range(1, 102)) == {21, 41, 61, 81, 101}
    assert measured_steps(range(41, 102)) == {53, 65, 77, 89, 101}
    assert measured_steps(range(5, 5)) == frozenset()
    for last in range(2, 50):
        found = measured_steps(range(1, last + 1))
        assert 1 <= len(found) <= MEASURED_STEPS and last in found and 1 not in found


def test_steps_that_a_rank_profiles_are_measured_on_none():
    assert measured_steps(range(1, 11), [range(9, 11)]) == {4, 5, 6, 7, 8}
    assert measured_steps(range(1, 3), [range(2, 3)]) == frozenset()


def differs(rank, world_size, words):
    """Exchange measurements of which rank 1 could not take some, as while its graphs were being captured."""
    _, step = make_job(rank, world_size, words)
    step.measure(frozenset({1, 2}), base_bytes=0)
    for number, possible in ((1, False), (2, rank == 0)):
        with step.measurement.step(number, possible=possible):
            step.update(number, step.accumulate(number))
    nothing = step.measurement.gather()
    step.measure(frozenset({3, 4}), base_bytes=0)
    for number, possible in ((3, rank == 0), (4, True)):
        with step.measurement.step(number, possible=possible):
            step.update(number, step.accumulate(number))
    return nothing, step.measurement.gather()


def test_ranks_that_measured_other_steps_do_not_wait_for_each_other(gang, corpus):
    for nothing, some in gang(2).run(differs, ["mesh.dp_shard=2", *corpus]):
        assert nothing is None and some.steps == (4,) and len(some.parts) == 2
