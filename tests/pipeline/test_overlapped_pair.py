"""Overlapped pairs in the executor: simulated time, gradients, positions, failures, traces, and FSDP2."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from meshwright.comm.collectives import open_channels
from meshwright.mesh.process_groups import new_group
from meshwright.parallel.data_parallel import reduce_gradients, set_gradient_sync
from meshwright.pipeline.actions import Action, ActionKind, Overlap
from meshwright.pipeline.execute import Executor, OverlappedPair, channel_keys, takes_turns
from meshwright.pipeline.generate import generate
from meshwright.pipeline.lower import LowerOptions, lower
from meshwright.pipeline.receive_buffers import ReceiveBuffers, TensorSpec
from meshwright.pipeline.timeline import ThreadClock, compute_spans
from tests.comm.virtual_clock import VirtualClock
from tests.pipeline.expert_stages import WIDTH, ExpertStage, GroupExchange

CPU = torch.device("cpu")
OPEN_S = 300  # until ranks have met: nothing here waits for it
ROWS = 4
K = ActionKind


class SimulatedExchange:
    """An exchange on one rank that takes simulated time, after a computation."""

    def __init__(self):
        self.clock = VirtualClock()

    def __call__(self, name, x):
        self.clock.compute(name, 1.0)
        self.clock.all_to_all(name, 1.0)
        return x.clone()


def one_rank(num_microbatches=4):
    """DualPipeV on one rank: both chunks, and every pair but the first overlapped."""
    return generate("dualpipe-v", num_stages=1, num_microbatches=num_microbatches)


def make(table, exchange, *, overlaps, post=None, **options):
    torch.manual_seed(17)
    batches = torch.randn(table.num_microbatches, ROWS, WIDTH, dtype=torch.float64)
    stages = {
        n: ExpertStage(
            n, table.num_stages, batches, exchange, overlaps=overlaps, splits=table.splits_backward, **options
        )
        for n in range(table.num_stages)
    }
    return Executor(lower(table), rank=0, stages=stages, channels={}, buffers=None, post=post), stages


def pair_only(table):
    """The pairs of a table take turns in one operation each; count them."""
    return sum(isinstance(action, Overlap) for action in table.actions[0])


def test_pairs_take_at_most_0_7_of_the_sum_in_simulated_time():
    """Each forward and backward: two computations of 1, each followed by an all-to-all of 1."""
    times = {}
    for overlaps in (False, True):
        exchange = SimulatedExchange()
        executor, _ = make(one_rank(8), exchange, overlaps=overlaps)
        clock, spent = exchange.clock, 0.0
        for _, actions, operation in executor._steps:
            start = clock.now
            operation()
            if len(actions) == 2 or (not overlaps and _is_of_pair(one_rank(8), actions[0])):
                spent += clock.now - start
        times[overlaps] = spent
    num_pairs = pair_only(one_rank(8))
    assert times[False] == num_pairs * 8.0  # two computations and two all-to-alls, of two parts
    assert times[True] == num_pairs * 5.0  # four computations and the last all-to-all
    assert times[True] <= 0.7 * times[False]


def _is_of_pair(table, action):
    return any(isinstance(pair, Overlap) and action in pair.parts() for pair in table.actions[0])


def test_a_backward_computes_while_a_forward_s_all_to_all_is_in_flight():
    exchange = SimulatedExchange()
    executor, _ = make(one_rank(), exchange, overlaps=True)
    for _, _, operation in executor._steps:
        exchange.clock.events.clear()
        operation()
        if isinstance(operation, OverlappedPair):
            break
    assert exchange.clock.events == [
        "compute F1 dispatch", "start F1 dispatch",
        "compute B0 combine", "start B0 combine",
        "done F1 dispatch", "compute F1 combine", "start F1 combine",
        "done B0 combine", "compute B0 dispatch", "start B0 dispatch",
        "done F1 combine",
        "done B0 dispatch",
    ]  # fmt: skip


@pytest.mark.parametrize("recomputes", [False, True])
def test_gradients_are_bitwise_those_without_overlap(recomputes):
    found = []
    for overlaps in (False, True):
        executor, stages = make(one_rank(), SimulatedExchange(), overlaps=overlaps, recomputes=recomputes)
        for _ in range(2):
            executor.run()
        found.append([gradient for stage in stages.values() for gradient in stage.gradients()])
        live = executor._live
        assert not (live.inputs or live.input_gradients or live.edges or live.gradients or live.weights)
    assert all(map(torch.equal, *found))


def test_positions_are_posted_as_without_overlap():
    posted = {False: [], True: []}
    for overlaps, positions in posted.items():
        make(one_rank(), SimulatedExchange(), overlaps=overlaps, post=positions.append)[0].run()
    assert posted[True] == posted[False] == list(range(len(posted[False])))


class Broken(Exception):
    pass


@pytest.mark.parametrize("part", ["F1 combine", "B0 dispatch", "F1 dispatch", "B0 combine"])
def test_the_position_posted_last_is_that_of_the_computation_that_failed(part):
    class Fails(SimulatedExchange):
        def __call__(self, name, x):
            result = super().__call__(name, x)
            if name == part and self.clock.events[-3:] and len(posted) > first:
                raise Broken
            return result

    posted = []
    exchange = Fails()
    table = one_rank()
    row = [part for action in lower(table).actions[0] for part in action.parts()]
    pair = next(action for action in table.actions[0] if isinstance(action, Overlap))
    first = row.index(pair.first)
    executor, _ = make(table, exchange, overlaps=True, post=posted.append)
    with pytest.raises(Broken):
        executor.run()
    assert row[posted[-1]] == (pair.first if part.startswith("F") else pair.second)


def test_a_trace_has_every_computation_in_order_and_no_time_twice():
    executor, _ = make(one_rank(), SimulatedExchange(), overlaps=True)
    spans = compute_spans(executor.run_timed(ThreadClock()), rank=0)
    assert [s.action for s in spans] == [part for action in one_rank().actions[0] for part in action.parts()]
    assert all(a.end <= b.start and a.start < a.end for a, b in zip(spans, spans[1:], strict=False))


def test_which_pairs_take_turns():
    pair = Overlap(Action(K.FORWARD, 0, 1), Action(K.BACKWARD, 3, 0))
    assert takes_turns(pair, {0}) and takes_turns(pair, {3}) and not takes_turns(pair, {1, 2})
    assert takes_turns(Overlap(Action(K.FORWARD, 0, 1), Action(K.BACKWARD_WEIGHT, 3, 0)), {0})
    same_stage = Overlap(Action(K.FORWARD, 0, 1), Action(K.BACKWARD, 0, 0))
    two_backwards = Overlap(Action(K.BACKWARD, 0, 1), Action(K.BACKWARD_INPUT, 3, 0))
    assert not takes_turns(same_stage, {0, 3}) and not takes_turns(two_backwards, {0, 3})


def test_pairs_of_stages_without_all_to_alls_run_one_after_the_other():
    executor, _ = make(one_rank(), SimulatedExchange(), overlaps=False)
    assert not any(isinstance(operation, OverlappedPair) for _, _, operation in executor._steps)
    assert all(len(actions) == 1 for _, actions, _ in executor._steps)


# ---- several ranks


class Logged(GroupExchange):
    """An exchange that logs its name."""

    def __init__(self, group):
        super().__init__(group)
        self.log = []

    def __call__(self, name, x):
        self.log.append(name)
        return super().__call__(name, x)


def dualpipe_on_two_by_two(rank, world_size):
    """Pipeline of two ranks, and two of them; each stage exchanges with the same stage of the other pipeline."""
    torch.manual_seed(23 + rank // 2)
    groups = [new_group([position, position + 2], timeout_s=OPEN_S) for position in range(2)]
    position = rank % 2
    table = generate("dualpipe-v", num_stages=2, num_microbatches=6)
    lowered = lower(table)
    keys = channel_keys(lowered)
    ends = [(2 * column + source, 2 * column + target) for column in range(2) for source, target, _ in keys]
    opened = zip(keys * 2, open_channels(ends, rank=rank, timeout_s=OPEN_S), strict=True)
    channels = {key: channel for key, channel in opened if channel is not None}
    batches = torch.randn(6, ROWS, WIDTH, dtype=torch.float64)
    edges = dict.fromkeys(range(3), TensorSpec((ROWS, WIDTH), torch.float64))
    found, logs = [], []
    for overlaps in (False, True):
        exchange = Logged(groups[position])
        stages = {n: ExpertStage(n, 4, batches, exchange, overlaps=overlaps, splits=table.splits_backward)
                  for n in table.stages_of(position)}  # fmt: skip
        buffers = ReceiveBuffers(lowered, rank=position, edges=edges, device=CPU, poison=True)
        executor = Executor(lowered, rank=position, stages=stages, channels=channels, buffers=buffers)
        for _ in range(2):
            executor.run()
        found.append([gradient for stage in stages.values() for gradient in stage.gradients()])
        logs.append(exchange.log)
    return all(map(torch.equal, *found)), logs


def test_dualpipe_v_on_four_ranks_gives_bitwise_the_gradients_without_overlap(gang):
    results = gang(4).run(dualpipe_on_two_by_two)
    assert all(is_equal for is_equal, _ in results)
    for position in range(2):
        (_, (plain, overlapped)), (_, others) = results[position], results[position + 2]
        assert others == [plain, overlapped]  # both ranks of a group enter its all-to-alls in the same order
        assert sorted(plain) == sorted(overlapped) and plain != overlapped


class ShardedStage(ExpertStage):
    """A stage of an FSDP2 unit within a unit."""

    def __init__(self, *args, mesh, **options):
        super().__init__(*args, **options)
        fully_shard(self.module.experts, mesh=mesh)
        fully_shard(self.module, mesh=mesh)

    def before_backward(self, *, reduces):
        set_gradient_sync(self.module, reduces)

    def reduce(self, *, done):
        if not done:
            reduce_gradients(self.module)

    def gradients(self):
        return [gradient.to_local() for gradient in super().gradients()]


def fsdp2_stages(rank, world_size, recomputes):
    mesh = dist.init_device_mesh("cpu", (2,))
    table = one_rank(6)
    batches = torch.randn(6, ROWS, WIDTH, dtype=torch.float64) + rank
    found = []
    for overlaps in (False, True):
        exchange = GroupExchange(mesh.get_group())
        options = {"overlaps": overlaps, "recomputes": recomputes, "splits": True, "mesh": mesh}
        stages = {n: ShardedStage(n, 2, batches, exchange, **options) for n in range(2)}
        lowered = lower(table, LowerOptions(reduces=True))
        executor = Executor(lowered, rank=0, stages=stages, channels={}, buffers=None)
        for _ in range(2):
            executor.run()
        found.append([gradient for stage in stages.values() for gradient in stage.gradients()])
    return all(map(torch.equal, *found)), all(gradient.abs().sum() > 0 for gradient in found[0])


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", [False, True])
def test_fsdp2_stages_give_bitwise_the_gradients_without_overlap(gang, recomputes):
    assert gang(2).run(fsdp2_stages, recomputes) == [(True, True)] * 2
