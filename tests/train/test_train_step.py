"""A step that is not finite on one rank is skipped on all of them, and its parts are those of the plan."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.distributed.tensor import DTensor

from meshwright.errors import LayoutError
from meshwright.mesh.local_shards import to_local
from meshwright.plan.run_plan import Auxiliary
from meshwright.train.optimizer import named_state
from meshwright.train.step_handles import _auxiliary
from meshwright.train.train_step import vocab_context
from tests.helpers import small_corpus
from tests.plan.plans import fake
from tests.train.jobs import make_job, run_on

ONE, SHARD, TP, BOTH = (1,), (2, "mesh.dp_shard=2"), (2, "mesh.tp=2"), (4, "mesh.tp=2", "mesh.dp_shard=2")
"""Layouts: ranks and words."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return [*small_corpus(tmp_path_factory.mktemp("step")), "model.num_layers=1"]


@pytest.fixture(scope="module")
def clean(gang, corpus):
    """The third step of an untouched job on a layout."""

    @cache
    def run(world_size, *layout):
        return run_on(gang, world_size, steps_with_a_spoilt_one, [*corpus, *layout], None, "loss", 1.0)

    return run


def spoil(job, kind, value):
    """Make this rank's next loss, or one number of its gradients, `value`."""
    if kind == "gradient":
        gradient = to_local(next(p.grad for p in job.model.parameters() if to_local(p.grad).numel()))
        gradient.view(-1)[0] = value


def steps_with_a_spoilt_one(rank, world_size, words, bad_rank, kind, value):
    """Two good steps, one spoilt on `bad_rank`, one good: the spoilt result, whether it changed anything, the last."""
    job, step = make_job(rank, world_size, words)
    step(1), step(2)
    before = {name: to_local(tensor).clone() for name, tensor in named_state(job.model, job.optimizer).items()}
    loss = step.accumulate(3)
    if rank == bad_rank:
        spoil(job, kind, value)
        loss = loss * value if kind == "loss" else loss
    spoilt = step.update(3, loss)
    after = named_state(job.model, job.optimizer)
    changed = [name for name, tensor in after.items() if not torch.equal(to_local(tensor), before[name])]
    leftover = [p for p in job.model.parameters() if p.grad is not None]
    return spoilt, changed, len(leftover), step(3)


@pytest.mark.parametrize(
    ("layout", "kind", "value"),
    [
        (TP, "loss", math.nan),
        pytest.param(BOTH, "loss", math.nan, marks=pytest.mark.slow),
        pytest.param(ONE, "gradient", math.nan, marks=pytest.mark.slow),
        pytest.param(TP, "gradient", math.nan, marks=pytest.mark.slow),
        (SHARD, "gradient", math.inf),
    ],
)
def test_all_ranks_skip_what_is_not_finite_on_one(gang, corpus, clean, layout, kind, value):
    world_size, *words = layout
    results = run_on(gang, world_size, steps_with_a_spoilt_one, [*corpus, *words], world_size - 1, kind, value)
    for spoilt, changed, leftover, after in results:
        assert spoilt.skipped and not changed and not leftover
        assert not after.skipped and math.isfinite(after.loss)
        # The step done again is the step that would have been done.
        third = clean(*layout)[0][0]
        assert (after.loss, after.grad_norm) == (third.loss, third.grad_norm)
    assert len({str(result[0]) for result in results}) == 1
    assert all(not spoilt.skipped and changed for spoilt, changed, _, _ in clean(*layout))


def handlers(rank, world_size, words):
    """Operators that DTensor's dispatcher has handlers of: before, within and after a failed step."""
    job, _ = make_job(rank, world_size, words)
    table = DTensor._op_dispatcher._custom_op_handlers
    found = [sorted(map(str, table))]
    with pytest.raises(KeyError), vocab_context(job):
        found.append(sorted(map(str, table)))
        raise KeyError
    found.append(sorted(map(str, table)))
    return found


def test_a_failed_step_leaves_no_handler_of_losses_behind(gang, corpus):
    for before, within, after in gang(2).run(handlers, [*corpus, "mesh.tp=2"]):
        assert before == after and len(within) > len(before)


def requests(rank, world_size, words, stops, saves):
    job, step = make_job(rank, world_size, words)
    step._stop_requested, step._save_due = lambda: rank == stops, lambda: rank == saves
    result = step(1)
    return result.stop, result.save


@pytest.mark.parametrize(("stops", "saves"), [(0, None), (1, 0), (None, 0), (None, None)])
def test_all_ranks_hear_of_a_request_that_one_has(gang, corpus, stops, saves):
    found = gang(2).run(requests, [*corpus, "mesh.dp_shard=2"], stops, saves)
    assert found == [(stops is not None, saves is not None)] * 2


def test_gradients_are_clipped_to_the_limit(corpus):
    changes = []
    for limit in ("1e-3", "1e30"):
        job, step = make_job(0, 1, [*corpus, f"train.max_grad_norm={limit}", "train.precision=float64"])
        step._optimize = lambda lr, norm, step=step, job=job: (type(step)._optimize(step, lr, norm), changes.append(
            [p.grad.clone() for p in job.model.parameters()]))  # fmt: skip
        norm = step(1).grad_norm
    clipped, whole = (torch.cat([g.flatten() for g in gradients]) for gradients in changes)
    assert whole.norm().item() == pytest.approx(norm, rel=1e-12)
    torch.testing.assert_close(clipped, whole * (1e-3 / norm), rtol=1e-12, atol=0)


def counted(rank, world_size, words, extra):
    """Losses of the first step by a fixed count of units, and where every sample has its own."""
    losses = []
    for is_fixed in (True, False):
        _, step = make_job(rank, world_size, [*words, "train.precision=float64"])
        if not is_fixed:
            step._task.units_per_sample = None
            step._task.count = lambda samples: sum(64 + extra * (i % 3) for i in samples)
        losses.append(step(1).loss)
    return losses


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(1, ["train.num_microbatches=2"]), (2, ["mesh.dp_shard=2"]),
     pytest.param(2, ["mesh.tp=2"], marks=pytest.mark.slow),
     pytest.param(4, ["mesh.pp=2", "mesh.dp_replicate=2", "train.num_microbatches=2", "model.num_layers=2"],
                  marks=pytest.mark.slow)],
)  # fmt: skip
def test_the_divisor_is_counted_over_the_global_batch(gang, corpus, world_size, layout):
    extra = 5
    units = sum(64 + extra * (i % 3) for i in range(8))
    for fixed, found in run_on(gang, world_size, counted, [*corpus, *layout], extra):
        assert found == pytest.approx(fixed * 8 * 64 / units, rel=1e-12)


def test_losses_of_one_name_in_two_kinds():
    plan = fake(tp=2)
    block, end = plan.kind("block"), plan.kind("head")
    other = replace(block, auxiliary=(Auxiliary("balance", ()),))
    held = [(block, 1), (other, 10), (replace(end, auxiliary=(Auxiliary("balance", ("dp_shard",)),)), None)]
    assert block.auxiliary[0].work == ("tp",)
    assert _auxiliary(held, "blocks.1.balance", "balance").work == ("tp",)
    assert _auxiliary(held, "blocks.10.balance", "balance").work == ()
    assert _auxiliary(held, "balance", "balance").work == ("dp_shard",)
    with pytest.raises(LayoutError, match=r"blocks\.1\.z computes .* z, but the plan lists no such loss"):
        _auxiliary(held, "blocks.1.z", "z")
