"""all_to_all against gathering everything and slicing; its gradients; what it says of wrong splits; and in flight.

Started and waited for later, it is what the form that waits at once is made of: gradients are tested with that one.
"""

from __future__ import annotations

import inspect
from datetime import timedelta
from functools import partial

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import meshwright.comm
from meshwright.comm import all_to_all, collectives
from meshwright.comm.alltoallv import SplitExchange, _in_flight, all_to_all_into, start_all_to_all
from meshwright.comm.collective_log import CollectiveError, group_record
from meshwright.errors import LayoutError, MeshwrightError

# plan[a][b]: rows from rank a to rank b

PLANS = {
    "even": [[2, 2], [2, 2]],
    "uneven": [[0, 5, 1], [3, 0, 2], [4, 1, 7]],
    "nothing to itself": [[0, 3], [2, 0]],
    "a rank sends nothing": [[0, 0, 0], [1, 2, 3], [2, 0, 1]],
    "a rank receives nothing": [[1, 0, 2], [3, 0, 1], [0, 0, 4]],
    "a rank does neither": [[1, 0, 2], [0, 0, 0], [3, 0, 4]],
    "one pair": [[0, 0, 0, 0], [0, 0, 0, 6], [0, 0, 0, 0], [0, 0, 0, 0]],
    "nobody": [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
    "nobody of two": [[0, 0], [0, 0]],
    "large": [[70_001, 13, 0], [1, 99_999, 40_000], [5, 0, 50_000]],
}


IN_FLIGHT = ["uneven", "a rank does neither", "nothing to itself", "nobody of two"]
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def splits(plan, rank):
    return {"send_splits": plan[rank], "recv_splits": [row[rank] for row in plan]}


def back(plan):
    """The way back of every row."""
    return [list(column) for column in zip(*plan, strict=True)]


def random_rows(plan, rank, *, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(97 * seed + rank)
    return (10 * torch.randn(sum(plan[rank]), 3, generator=generator, dtype=torch.float64)).to(dtype)


def rows(plan, rank, *, width=3, dtype=torch.float64):
    """Rows of a rank, all different from those of every rank."""
    start = sum(sum(row) for row in plan[:rank])
    count = sum(plan[rank])
    return (torch.arange(start * width, (start + count) * width).view(count, width) % 251).to(dtype)


def expected(plan, rank, of):
    """Gather everything, by `of(rank)`, and slice."""
    parts = [of(a).split(plan[a])[rank] for a in range(len(plan))]
    return torch.cat(parts)


def moved_and_gradient(rank, world_size, plan):
    x = rows(plan, rank).requires_grad_()
    y = all_to_all(x, **splits(plan, rank))
    weight = 1 + rows(back(plan), rank)
    (y**3 * weight).sum().backward()
    return y.detach(), x.grad, weight


@pytest.mark.parametrize("name", list(PLANS))
def test_rows_and_gradients_are_those_of_a_plain_reference(gang, name):
    check_against_reference(gang, PLANS[name])


@hypothesis.given(st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=3, max_size=3))
@hypothesis.settings(max_examples=15)
def test_any_splits_do(gang, plan):
    check_against_reference(gang, plan)


def check_against_reference(gang, plan):
    found = gang(len(plan)).run(moved_and_gradient, plan)
    for rank, (y, gradient, _) in enumerate(found):
        assert torch.equal(y, expected(plan, rank, lambda a: rows(plan, a)))
        weight = expected(back(plan), rank, lambda a: found[a][2])
        assert torch.equal(gradient, 3 * rows(plan, rank) ** 2 * weight)


def of_any_type(rank, world_size, plan):
    found = []
    for dtype in TYPES:
        x = rows(plan, rank, dtype=dtype)
        y = all_to_all(x, **splits(plan, rank))
        flat = all_to_all(x[:, 0], **splits(plan, rank))
        found.append((y.dtype == flat.dtype == dtype, y.view(torch.uint8).tolist(), flat.view(torch.uint8).tolist()))
    return found


TYPES = [torch.uint8, torch.int16, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float32,
         torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]  # fmt: skip


@pytest.mark.parametrize("name", ["uneven", "a rank does neither", "nobody"])
def test_any_type_arrives_bit_for_bit(gang, name):
    plan = PLANS[name]
    for rank, found in enumerate(gang(len(plan)).run(of_any_type, plan)):
        for dtype, (same_type, y, flat) in zip(TYPES, found, strict=True):
            wanted = expected(plan, rank, lambda a, dtype=dtype: rows(plan, a, dtype=dtype))
            assert same_type and y == wanted.view(torch.uint8).tolist(), dtype
            first = wanted[:, 0].clone(memory_format=torch.contiguous_format)  # empty, any stride counts as contiguous
            assert flat == first.view(torch.uint8).tolist(), dtype


def of_any_layout(rank, world_size, plan):
    x = rows(plan, rank, width=6).view(-1, 2, 3)
    complex_x = torch.complex(x, -x)
    views = [
        (x, x), (x.transpose(1, 2), x.transpose(1, 2)), (x[:, 1, ::2], x[:, 1, ::2]), (x[..., :0], x[..., :0]),
        (x.transpose(0, 2).contiguous().transpose(0, 2), x), (x[:, :1].expand(-1, 4, -1), x[:, :1].expand(-1, 4, -1)),
        (complex_x.conj(), torch.complex(x, x)), (complex_x.conj().imag, x),
    ]  # fmt: skip
    same = []
    for view, plain in views:
        y = all_to_all(view, **splits(plan, rank))
        reference = torch.cat(
            [part.split(sent)[rank] for part, sent in zip(collectives.all_gather_object(plain), plan, strict=True)]
        )
        same.append(y.is_contiguous() and torch.equal(y, reference))
    return same


def test_strides_and_shapes_make_no_difference(gang):
    assert all(all(same) for same in gang(3).run(of_any_layout, PLANS["uneven"]))


# Derivatives across ranks: of what arrives at one rank, by everything that all ranks send


class Everywhere(torch.autograd.Function):
    """A value that all ranks hold alike: its gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return collectives.all_reduce_sum(gradient.clone())


class From(torch.autograd.Function):
    """What one rank holds, on all ranks."""

    @staticmethod
    def forward(ctx, y, rank, num_rows):
        ctx.source = (rank, y.shape[0])
        out = y.clone() if collectives.rank() == rank else y.new_empty(num_rows, *y.shape[1:])
        return collectives.broadcast(out, src=rank)

    @staticmethod
    def backward(ctx, gradient):
        rank, num_rows = ctx.source
        mine = collectives.rank() == rank
        return gradient if mine else gradient.new_zeros(num_rows, *gradient.shape[1:]), None, None


def check_gradients(rank, world_size, plan):
    start, count = sum(sum(row) for row in plan[:rank]), sum(plan[rank])
    everything = torch.randn(sum(map(sum, plan)), 2, dtype=torch.float64, requires_grad=True)

    def arriving_at(target):
        def function(x):
            y = all_to_all(Everywhere.apply(x)[start : start + count] ** 2, **splits(plan, rank))
            return From.apply(y, target, sum(row[target] for row in plan))

        return function

    return [torch.autograd.gradcheck(arriving_at(target), everything) for target in range(world_size)]


@pytest.mark.parametrize("plan", [[[1, 2], [2, 0]], [[0, 1, 0], [0, 0, 0], [1, 1, 1]]])
def test_gradcheck_over_ranks(gang, plan):
    assert all(all(passed) for passed in gang(len(plan)).run(check_gradients, plan))


def second_gradient(rank, world_size, plan):
    x = rows(plan, rank).requires_grad_()
    y = all_to_all(x, **splits(plan, rank))
    weight = 1 + rows(back(plan), rank)
    (first,) = torch.autograd.grad((y**3 * weight).sum(), x, create_graph=True)
    (first**2).sum().backward()
    return weight, x.grad


@pytest.mark.parametrize("name", ["uneven", "a rank does neither"])
def test_it_is_differentiable_twice(gang, name):
    plan = PLANS[name]
    found = gang(len(plan)).run(second_gradient, plan)
    for rank, (_, gradient) in enumerate(found):
        weight = expected(back(plan), rank, lambda a: found[a][0])
        assert torch.equal(gradient, 36 * weight**2 * rows(plan, rank) ** 3)


# Being called wrongly


PERMUTATIONS = ([1, 0, 3, 2], [2, 3, 1, 0], [0, 2, 1, 3], [0, 1, 2, 3], [None, 2, 0, None])
"""Whom each rank sends to."""


def permuted(rank, world_size, targets, dtype):
    """What arrives by messages, and what the collective brings."""
    rows = [5 if target is not None else 0 for target in targets]
    send = [rows[rank] * (other == targets[rank]) for other in range(world_size)]
    recv = [rows[other] * (targets[other] == rank) for other in range(world_size)]
    x = (torch.arange(rows[rank] * 3).view(-1, 3) + 100 * rank).to(dtype)
    found = [x.new_full((sum(recv), 3), 1) for _ in range(2)]
    for out, permutes in zip(found, (True, False), strict=True):
        all_to_all_into(out, x, send_splits=send, recv_splits=recv, group=None, permutes=permutes)
    return torch.equal(*(out.view(torch.uint8) for out in found)), found[0].float().sum().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e5m2])
def test_a_permutation_by_messages_is_that_of_the_collective(gang, dtype):
    for targets in PERMUTATIONS:
        for rank, (same, total) in enumerate(gang(4).run(permuted, targets, dtype)):
            sent = [(torch.arange(15) + 100 * a).to(dtype).float().sum().item() for a in range(4) if targets[a] == rank]
            assert same and total == sum(sent)


def test_arguments_cannot_be_swapped():
    kinds = {name: parameter.kind for name, parameter in inspect.signature(all_to_all).parameters.items()}
    assert meshwright.comm.all_to_all is all_to_all
    assert [name for name, kind in kinds.items() if kind != inspect.Parameter.KEYWORD_ONLY] == ["x"]
    with pytest.raises(TypeError):
        all_to_all(torch.ones(1), torch.ones(1))


def test_alone_it_copies():
    x = torch.arange(6.0).view(3, 2).t().requires_grad_()
    y = all_to_all(x, send_splits=[2], recv_splits=[2])
    assert torch.equal(y, x) and y.data_ptr() != x.data_ptr()
    (y**2).sum().backward()
    assert torch.autograd.gradcheck(lambda x: all_to_all(x, send_splits=[2], recv_splits=[2]), x.detach().double()
                                    .requires_grad_())  # fmt: skip


@pytest.mark.parametrize(
    ("x", "send", "recv", "said"),
    [
        (torch.ones(3), [2], [2], "send_splits = [2] sum to 2, but x has 3 rows"),
        (torch.ones(3), [3], [2], "send_splits = [3] and recv_splits = [2] differ with world size 1"),
        (torch.ones(3), [1, 2], [3], "send_splits = [1, 2] has 2 entries for 1 rank"),
        (torch.ones(3), [3], [], "recv_splits = [] has 0 entries for 1 rank"),
        (torch.ones(3), [3], [-3], "recv_splits = [-3] has a negative number"),
        (torch.ones(()), [1], [1], "x is a 0-dim tensor"),
    ],
)
def test_wrong_splits_are_told(x, send, recv, said):
    for call in (all_to_all, start_all_to_all):
        with pytest.raises(LayoutError) as caught:
            call(x, send_splits=send, recv_splits=recv)
        error = caught.value
        assert error.what.startswith(said) and error.where and error.rule and error.fix


def test_splits_are_whole_numbers():
    with pytest.raises(TypeError):
        all_to_all(torch.ones(3), send_splits=[3.0], recv_splits=[3])
    counts = torch.tensor([3])
    assert all_to_all(torch.ones(3), send_splits=counts, recv_splits=counts).tolist() == [1, 1, 1]


def told(rank, world_size, changes, environment):
    """The error of an all_to_all in debug mode; `changes` by rank: what it calls it with instead."""
    if environment:
        import os

        os.environ["MESHWRIGHT_DEBUG_COLLECTIVES"] = "1"
    plan = PLANS["uneven"]
    arguments = {"x": rows(plan, rank), **splits(plan, rank), **changes.get(rank, {})}
    try:
        return all_to_all(**arguments, debug=not environment).shape[0]
    except MeshwrightError as error:
        return str(error)


@pytest.mark.parametrize("environment", [False, True])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({1: {"recv_splits": [4, 0, 1]}}, "rank 0 sends 5 rows to rank 1, which expects 4"),
        ({2: {"send_splits": [5, 0, 7]}},
         "rank 2 sends 5 rows to rank 0, which expects 4; rank 2 sends 0 rows to rank 1, which expects 1"),
        ({0: {"send_splits": [0, 5]}}, "rank 0: send_splits = [0, 5] has 2 entries for 3 ranks"),
        ({2: {"send_splits": [1, 1, 1]}}, "rank 2: send_splits = [1, 1, 1] sum to 3, but x has 12 rows"),
        ({1: {"x": torch.ones(5, 3)}}, "rank 1: rows of float32 [3]"),
        ({0: {"x": torch.ones(6, 2, dtype=torch.float64)}}, "rank 0: rows of float64 [2]"),
        ({1: {"x": torch.ones(5, 3, dtype=torch.float64, requires_grad=True)}}, "whether x requires a gradient"),
    ],
)  # fmt: skip
def test_in_debug_mode_all_ranks_name_those_that_disagree(gang, changes, said, environment):
    found = gang(3).run(told, changes, environment)
    assert said in found[0] and found[0] == found[1] == found[2]


def test_debug_mode_lets_pass_what_is_right(gang):
    assert gang(3).run(told, {}, True) == gang(3).run(told, {}, False) == [7, 6, 10]


def inside_a_group(rank, world_size):
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    sent = [1, 2] if rank == 1 else [3, 0]
    arriving = [1, 3] if rank == 1 else [2, 0]
    return all_to_all(torch.full((3,), rank), send_splits=sent, recv_splits=arriving, group=group, debug=True).tolist()


def test_splits_are_by_the_ranks_of_the_group(gang):
    assert gang(4).run(inside_a_group) == [None, [1, 3, 3, 3], None, [1, 1]]


# In flight


def same_bits(one, other):
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(torch.uint8), other.view(torch.uint8))


def both_forms(rank, world_size, plan):
    """Whether they bring the same, by type; and how many transfers nobody waited for."""
    found = []
    for dtype in TYPES:
        x = random_rows(plan, rank, dtype=dtype)
        handle = start_all_to_all(x, **splits(plan, rank))
        num_started = len(_in_flight())
        found.append(same_bits(handle.wait(), all_to_all(x, **splits(plan, rank))) and num_started == 1)
    return found, len(_in_flight())


@pytest.mark.parametrize("name", IN_FLIGHT)
def test_rows_of_any_type_are_those_of_the_form_that_waits(gang, name):
    plan = PLANS[name]
    for found, left in gang(len(plan)).run(both_forms, plan):
        assert found == [True] * len(TYPES) and left == 0


def two_in_flight(rank, world_size, plan):
    """Outputs and gradients of two that are waited for in reverse order, and of two that wait at once."""
    found = []
    for in_flight in (True, False):
        inputs = [random_rows(plan, rank, seed=n).requires_grad_() for n in range(2)]
        if in_flight:
            handles = [start_all_to_all(x, **splits(plan, rank)) for x in inputs]
            num_started = len(_in_flight())
            last, first = handles[1].wait(), handles[0].wait()
        else:
            first, last = (all_to_all(x, **splits(plan, rank)) for x in inputs)
        (first.sin() + 2 * last.cos()).sum().backward()
        found.append([first.detach(), last.detach(), *(x.grad for x in inputs)])
    return found, num_started, len(_in_flight())


@pytest.mark.parametrize("name", IN_FLIGHT)
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
    seen, x = [], random_rows(plan, rank).requires_grad_()
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


# Selective recomputation


def saves_transfers(must_save, context, operator, *args, **kwargs):
    is_start = operator == torch.ops.meshwright.all_to_all_start.default
    return CheckpointPolicy.MUST_SAVE if is_start and must_save else CheckpointPolicy.PREFER_RECOMPUTE


def recomputed(rank, world_size, plan, must_save):
    """Gradients, and the number of collectives of the forward and of the backward."""
    found = []
    for selective in (False, True):
        x = random_rows(plan, rank).requires_grad_()
        weight = random_rows(back(plan), rank, seed=1).requires_grad_()

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
    assert "test_alltoallv.py" in error.where and "wait_in_vain" in error.where
