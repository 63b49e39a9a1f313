"""The executor on one rank that has all stages: its results, and the lifetimes of tensors."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.nn.linear import Linear, defer_weight_gradients
from meshwright.nn.recompute import recompute
from meshwright.pipeline.actions import BACKWARDS, ActionKind
from meshwright.pipeline.execute import Executor
from meshwright.pipeline.generate import ScheduleKind, generate
from meshwright.pipeline.lower import LowerOptions, forward_only, lower
from meshwright.pipeline.schedule_table import Schedule, single_stage
from meshwright.pipeline.simulate import Costs, simulate
from meshwright.pipeline.timeline import ThreadClock, compute_spans


class Toy:
    """A stage with one weight that logs the calls of the executor."""

    weight_gradients = None
    overlaps = False

    def __init__(self, number, num_stages, batches, log):
        self.number, self.is_last, self.batches, self.log = number, number == num_stages - 1, batches, log
        self.weight = torch.full((3,), 1.0 + number / 8, dtype=torch.float64, requires_grad=True)

    def forward(self, microbatch, x):
        x = self.batches[microbatch] if x is None else x
        y = (x * self.weight).tanh()
        return y.square().sum() if self.is_last else y

    def before_backward(self, *, reduces):
        self.log.append((self.number, reduces))

    def reduce(self, *, done):
        self.log.append((self.number, "reduce", done))

    def unshard(self):
        self.log.append((self.number, "unshard"))

    def reshard(self):
        self.log.append((self.number, "reshard"))

    def sync_shared(self, number):
        self.log.append((self.number, "sync", number))


def on_one_rank(table: Schedule) -> Schedule:
    """The same computations with all stages on rank 0, in the order in which they start."""
    spans = sorted(simulate(table, Costs.uniform()).timeline.spans, key=lambda span: (span.start, span.rank))
    row = tuple(span.action for span in spans)
    return Schedule(table.kind, table.num_microbatches, (0,) * table.num_stages, (row,))


def make(table, **options):
    log = []
    batches = torch.randn(table.num_microbatches, 3, dtype=torch.float64)
    stages = {n: Toy(n, table.num_stages, batches, log) for n in range(table.num_stages)}
    executor = Executor(lower(table, **options), rank=0, stages=stages, channels={}, buffers=None)
    return executor, stages, batches, log


def test_what_autograd_does_not_need_is_let_go():
    """A stage that adds keeps neither its input nor its output."""
    alive = []

    class Adds(Toy):
        def forward(self, microbatch, x):
            x = self.batches[microbatch] if x is None else x
            y = x + self.weight
            alive.append(weakref.ref(y))
            return y.sum() if self.is_last else y

    table = on_one_rank(generate("f-then-b", num_stages=3, num_microbatches=4))
    log, batches = [], torch.randn(4, 3, dtype=torch.float64)
    stages = {n: Adds(n, 3, batches, log) for n in range(3)}
    held = []

    def post(position):
        held.append(sum(ref() is not None for ref in alive))

    Executor(lower(table), rank=0, stages=stages, channels={}, buffers=None, post=post).run()
    assert len(alive) == 12 and max(held) <= 1 and all(ref() is None for ref in alive)


def test_gradients_are_reduced_within_the_last_whole_backward():
    options = LowerOptions(reduces=True, keeps_unsharded=True)
    executor, _, _, log = make(single_stage(3), options=options)
    executor.run()
    assert log == [(0, "unshard"), (0, False), (0, False), (0, True), (0, "reduce", True), (0, "reshard")]
    executor, _, _, log = make(on_one_rank(generate("zb-h1", num_stages=1, num_microbatches=2)), options=options)
    executor.run()
    assert [entry for entry in log if "reduce" in entry] == [(0, "reduce", False)]
    assert (0, True) not in log


def test_an_evaluation_needs_no_autograd():
    executor, stages, _, log = make(forward_only(3, (0, 0)))
    executor.run()
    assert not log and all(stage.weight.grad is None for stage in stages.values())


def test_a_trace_has_every_computation_in_order():
    table = on_one_rank(generate("zb-v", num_stages=2, num_microbatches=4))
    executor, _, _, _ = make(table)
    spans = compute_spans(executor.run_timed(ThreadClock()), rank=0)
    assert [span.action for span in spans] == list(table.actions[0])
    assert all(a.end <= b.start and a.start <= a.end for a, b in zip(spans, spans[1:], strict=False))


class Layer(Toy):
    """A stage of a matrix, whose gradient can be deferred."""

    def __init__(self, number, num_stages, batches, *, splits):
        super().__init__(number, num_stages, batches, [])
        torch.manual_seed(number)
        self.layer = Linear(3, 3).double()
        self.weight_gradients = defer_weight_gradients(self.layer) if splits else None

    def forward(self, microbatch, x):
        y = self.layer(self.batches[microbatch] if x is None else x).tanh()
        return y.square().sum() if self.is_last else y


@pytest.mark.parametrize("release", [True, False])
@pytest.mark.parametrize("kind", list(ScheduleKind))
def test_every_schedule_gives_bitwise_the_gradients_of_a_plain_loop(kind, release):
    table = on_one_rank(generate(kind, num_stages=4, num_microbatches=8))
    batches = torch.randn(8, 5, 3, dtype=torch.float64)
    stages = {n: Layer(n, table.num_stages, batches, splits=table.splits_backward) for n in range(table.num_stages)}
    executor = Executor(lower(table, LowerOptions(release=release)), rank=0, stages=stages, channels={}, buffers=None)
    for _ in range(2):  # nothing is left over from one step to the next
        for stage in stages.values():
            stage.layer.weight.grad = None
        executor.run()
    live = executor._live
    assert not (live.inputs or live.input_gradients or live.edges or live.gradients or live.weights or live.to_send)
    assert not (live.outgoing or live.arriving)
    layers = [Layer(n, table.num_stages, batches, splits=False) for n in range(table.num_stages)]
    for m in range(8):
        x = None
        for layer in layers:
            x = layer.forward(m, x)
        x.backward()
    for stage, plain in zip(stages.values(), layers, strict=True):
        assert torch.equal(stage.layer.weight.grad, plain.layer.weight.grad)


class Counting(nn.Module):
    """A module that saves activations, and counts its forwards."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.calls = nn.Parameter(weight), 0

    def forward(self, x):
        self.calls += 1
        return ((x * self.weight).tanh() * self.weight).exp()


class Watched(Toy):
    """A stage that records the storage of its outputs."""

    def __init__(self, number, num_stages, batches, given, *, recomputes):
        super().__init__(number, num_stages, batches, [])
        self.given, self.recomputes, self.inner = given, recomputes, Counting(self.weight.detach())
        recompute(self.inner)

    def forward(self, microbatch, x):
        x = self.batches[microbatch] if x is None else x
        y = self.inner(x) if self.recomputes else x + self.weight
        if not self.is_last:
            self.given[self.number, microbatch] = StorageWeakRef(y.untyped_storage())
        return y.sum() if self.is_last else y


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("kind", ["f-then-b", "1f1b", "zb-v", "interleaved"])
def test_a_stage_s_input_stays_as_long_as_autograd_needs_it(kind, recomputes):
    """A sum saves nothing, so its input is freed after the forward; with recomputation only the input is kept, until
    the backward."""
    table = lower(on_one_rank(generate(kind, num_stages=4, num_microbatches=6)))
    given, batches, done = {}, torch.randn(6, 3, dtype=torch.float64), set()
    num = table.num_stages
    stages = {n: Watched(n, num, batches, given, recomputes=recomputes) for n in range(num)}
    row = table.actions[0]

    def is_needed(stage, m):
        ends = BACKWARDS if recomputes else {ActionKind.FORWARD}
        return not any((kind, stage + 1, m) in done for kind in ends)

    def post(position):
        if position:
            before = row[position - 1]
            done.add((before.kind, before.stage, before.microbatch))
        held = {key for key, storage in given.items() if not storage.expired()}
        assert held == {key for key in given if is_needed(*key)}, f"before {row[position]}"

    Executor(table, rank=0, stages=stages, channels={}, buffers=None, post=post).run()
    assert len(given) == (num - 1) * 6 and all(storage.expired() for storage in given.values())
    assert all(stage.inner.calls == (12 if recomputes else 0) for stage in stages.values())


def test_a_step_that_fails_says_what_it_did_last():
    """The position posted is that of the action that failed."""
    posted = []
    executor, stages, *_ = make(single_stage(3))
    executor = Executor(single_stage(3), rank=0, stages=stages, channels={}, buffers=None, post=posted.append)
    real = stages[0].forward
    stages[0].forward = lambda m, x: real(m, x) if m < 2 else 1 / 0
    with pytest.raises(ZeroDivisionError):
        executor.run()
    assert posted[-1] == 4  # F0 B0 F1 B1 F2
