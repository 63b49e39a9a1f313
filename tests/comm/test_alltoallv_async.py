"""An all-to-all in flight: started and waited for it is the one that waits at once; gradients, and recomputation."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.comm import all_to_all, collectives
from meshwright.comm.alltoallv import SplitExchange, _in_flight, start_all_to_all
from meshwright.comm.collective_log import CollectiveError, group_record
from meshwright.errors import LayoutError

# plan[a][b]: rows from rank a to rank b

PLANS = {
    "uneven": [[0, 5, 1], [3, 0, 2], [4, 1, 7]],
    "a rank does neither": [[1, 0, 2], [0, 0, 0], [3, 0, 4]],
    "one pair": [[0, 0], [6, 0]],
    "nobody": [[0, 0], [0, 0]],
}
TYPES = [torch.uint8, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64,
         torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]  # fmt: skip

OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def splits(plan, rank):
    return {"send_splits": plan[rank], "recv_splits": [row[rank] for row in plan]}


def back(plan):
    """The way back of every row."""
    return [list(column) for column in zip(*plan, strict=True)]


def rows(plan, rank, *, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(97 * seed + rank)
    return (10 * torch.randn(sum(plan[rank]), 3, generator=generator, dtype=torch.float64)).to(dtype)


def same_bits(one, other):
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(torch.uint8), other.view(torch.uint8))


def both_forms(rank, world_size, plan):
    """Whether they bring the same, by type; and how many transfers nobody waited for."""
    found = []
    for dtype in TYPES:
        x = rows(plan, rank, dtype=dtype)
        handle = start_all_to_all(x, **splits(plan, rank))
        num_started = len(_in_flight())
        found.append(same_bits(handle.wait(), all_to_all(x, **splits(plan, rank))) and num_started == 1)
    return found, len(_in_flight())


@pytest.mark.parametrize("name", list(PLANS))
def test_rows_of_any_type_are_those_of_the_form_that_waits(gang, name):
    plan = PLANS[name]
    for found, left in gang(len(plan)).run(both_forms, plan):
        assert found == [True] * len(TYPES) and left == 0


def two_in_flight(rank, world_size, plan):
    """Outputs and gradients of two that are waited for in reverse order, and of two that wait at once."""
    found = []
    for in_flight in (True, False):
        inputs = [rows(plan, rank, seed=n).requires_grad_() for n in range(2)]
        if in_flight:
            handles = [start_all_to_all(x, **splits(plan, rank)) for x in inputs]
            num_started = len(_in_flight())
            last, first = handles[1].wait(), handles[0].wait()
        else:
            first, last = (all_to_all(x, **splits(plan, rank)) for x in inputs)
        (first.sin() + 2 * last.cos()).sum().backward()
        found.append([first.detach(), last.detach(), *(x.grad for x in inputs)])
    return found, num_started, len(_in_flight())


@pytest.mark.parametrize("name", list(PLANS))
def test_two_in_flight_waited_for_in_reverse_order(gang, name):
    """Where outputs are empty, too: each is a transfer of its own."""
    for (found, expected), num_started, left in gang(len(PLANS[name])).run(two_in_flight, PLANS[name]):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert (num_started, left) == (2, 0)


class Records(torch.autograd.Function):
    """Identity whose backward notes what is in flight when it runs."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.seen.append(len(_in_flight()))
        return gradient, None


def gradient_in_flight(rank, world_size, plan):
    """What is in flight while the backward of what was computed between start and wait runs."""
    seen, x = [], rows(plan, rank).requires_grad_()
    other = torch.ones((), dtype=torch.float64, requires_grad=True)
    handle = start_all_to_all(x.sin(), **splits(plan, rank))
    between = Records.apply(other * 3, seen)
    y = handle.wait()
    ((y**2).sum() * between).backward()
    return seen, x.detach(), x.grad, len(_in_flight())


def test_a_gradient_is_in_flight_while_others_are_computed(gang):
    plan = PLANS["uneven"]
    for seen, x, gradient, left in gang(3).run(gradient_in_flight, plan):
        torch.testing.assert_close(gradient, 3 * 2 * x.sin() * x.cos(), rtol=0, atol=1e-12)
        assert seen == [1] and left == 0


def second_order(rank, world_size, plan):
    x = rows(plan, rank).requires_grad_()
    y = start_all_to_all(x, **splits(plan, rank)).wait()
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (first**2).sum().backward()
    return x.grad, 36 * x.detach() ** 3


def test_it_is_differentiable_twice(gang):
    for found, expected in gang(3).run(second_order, PLANS["uneven"]):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-9)


# Selective recomputation


def saves_transfers(must_save, context, operator, *args, **kwargs):
    is_start = operator == torch.ops.meshwright.all_to_all_start.default
    return CheckpointPolicy.MUST_SAVE if is_start and must_save else CheckpointPolicy.PREFER_RECOMPUTE


def recomputed(rank, world_size, plan, must_save):
    """Gradients, and the number of collectives of the forward and of the backward."""
    found = []
    for selective in (False, True):
        x = rows(plan, rank).requires_grad_()
        weight = rows(back(plan), rank, seed=1).requires_grad_()

        def run(x, weight=weight):
            y = start_all_to_all(x.sin(), **splits(plan, rank)).wait()
            return (y * weight).tanh()

        counts = [group_record(None).count if world_size > 1 else 0]
        if selective:
            contexts = partial(create_selective_checkpoint_contexts, partial(saves_transfers, must_save))
            y = checkpoint(run, x, use_reentrant=False, context_fn=contexts)
        else:
            y = run(x)
        counts.append(group_record(None).count)
        y.square().sum().backward()
        counts.append(group_record(None).count)
        found.append([y.detach(), x.grad, weight.grad])
    return found, [b - a for a, b in zip(counts, counts[1:], strict=False)], len(_in_flight())


@pytest.mark.parametrize("name", ["uneven", "a rank does neither", "nobody"])
@pytest.mark.parametrize("must_save", [True, False])
def test_selective_recomputation_saves_what_arrived(gang, name, must_save):
    """Saved, it's not sent again; not saved, it's sent again, and right as well."""
    for (expected, found), counts, left in gang(len(PLANS[name])).run(recomputed, PLANS[name], must_save):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert counts == [1, 1 if must_save else 2] and left == 0


@pytest.mark.parametrize(
    "checks", [("test_schema", "test_faketensor"), pytest.param(OPCHECKS, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_the_operator_is_one_that_pytorch_can_trace(checks):
    """Gradients are those of the start and the wait, not of the operator."""
    for shape in ((5, 3), (0, 3), (4,)):
        x = torch.randn(*shape)
        arguments = (x, [shape[0]], [shape[0]], "")
        torch.library.opcheck(torch.ops.meshwright.all_to_all_start.default, arguments, test_utils=checks)
        out = torch.ops.meshwright.all_to_all_start(*arguments)
        assert torch.equal(out, x) and out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_alone_it_copies():
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: start_all_to_all(x, send_splits=[4], recv_splits=[4]).wait(), x)
    with pytest.raises(LayoutError, match="sum to 3, but x has 4 rows"):
        start_all_to_all(x, send_splits=[3], recv_splits=[3])


# Counts


def exchanged(rank, world_size):
    """Counts of two exchanges in flight, read in reverse order."""
    counts = [torch.arange(world_size * 3).view(-1, 3) + 100 * rank + 1000 * n for n in range(2)]
    exchanges = [SplitExchange(one.t().contiguous().t(), None) for one in counts]
    later, earlier = (exchange.read() for exchange in reversed(exchanges))
    reads = group_record(None).split_reads if world_size > 1 else 2
    return earlier, later, reads, len(_in_flight())


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_counts_are_exchanged_and_read_once(gang, world_size):
    results = gang(world_size).run(exchanged) if world_size > 1 else [exchanged(0, 1)]
    for rank, (*both, reads, left) in enumerate(results):
        for n, (sent, received) in enumerate(both):
            assert sent == (torch.arange(world_size * 3).view(-1, 3) + 100 * rank + 1000 * n).tolist()
            assert received == [[3 * rank + i + 100 * a + 1000 * n for i in range(3)] for a in range(world_size)]
        assert (reads, left) == (2, 0)


# Errors


def wait_in_vain(rank, world_size, what):
    group = dist.new_group(timeout=timedelta(seconds=60))
    collectives.barrier(group)
    if rank == 1:
        return None
    group.set_timeout(timedelta(seconds=2))
    try:
        if what == "rows":
            start_all_to_all(torch.ones(2, 3), send_splits=[1, 1], recv_splits=[1, 1], group=group).wait()
        else:
            SplitExchange(torch.ones(2, 3, dtype=torch.int64), group).read()
    except CollectiveError as error:
        return error
    return None


@pytest.mark.slow
@pytest.mark.parametrize("what", ["rows", "counts"])
def test_an_all_to_all_that_others_do_not_enter_is_named(gang, what):
    error, _ = gang(2).run(wait_in_vain, what, timeout_s=120)
    assert isinstance(error, CollectiveError)
    of = "of float32 [2, 3]" if what == "rows" else "of int64 [2, 3]"
    assert "in all_to_all, number 2 in the group of ranks 0, 1, " in error.what and of in error.what
    assert "test_alltoallv_async.py" in error.where and "wait_in_vain" in error.where
