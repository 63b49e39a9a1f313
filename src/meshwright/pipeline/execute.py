"""Running a lowered table on one rank: flat dispatch over actions that were bound before the first step.

The table decides, this does. [Note: what is alive] Every micro-batch enters a stage through a node of autograd of its
own (`_Entry`), which hands the input's gradient out, so no leaf keeps the input alive; and a stage's output is held
only until it is sent or handed over: the backward starts from its gradient edge, which holds no storage. What autograd
saved stays, as it must. With `pipeline.release=false` the table frees at the end of the step, and only then.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.comm.p2p import Channel, Transfer
from meshwright.nn.deferred_weight_gradients import DeferredGradient, WeightGradStore, compute_deferred
from meshwright.pipeline.actions import BACKWARDS, COMPUTE, Action, ActionKind
from meshwright.pipeline.receive_buffers import Buffers
from meshwright.pipeline.schedule_table import Schedule
from meshwright.pipeline.timeline import Span

K = ActionKind
Operation = Callable[[], None]
ChannelKey = tuple[int, int, ActionKind]
"""Source rank and target rank of the pipeline, and the kind of send."""


class Stage(Protocol):
    """What the executor asks of a stage."""

    weight_gradients: WeightGradStore | None
    """Where gradients of weights are deferred; None if this stage's backward can't be split."""

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor:
        """The stage's output, or the loss on the last; `x` is None on the first."""

    def before_backward(self, *, reduces: bool) -> None:
        """Comes before each backward; `reduces`: gradients are to be reduced within it."""

    def reduce(self, *, done: bool) -> None:
        """Reduce the gradients of all micro-batches, unless the last backward did."""

    def unshard(self) -> None:
        """Gather the parameters until `reshard`."""

    def reshard(self) -> None:
        """Free the gathered parameters."""

    def sync_shared(self, number: int) -> None:
        """Add up the gradients of copies of shared parameters: of the group that comes at this place in the row."""


def channel_keys(schedule: Schedule) -> list[ChannelKey]:
    """The channels that a lowered table needs, in the order in which all ranks create them."""
    ranks = schedule.stage_ranks
    sends = (action for _, _, action in schedule.positions() if action.kind in (K.SEND_FORWARD, K.SEND_BACKWARD))
    keys = {(ranks[send.stage], ranks[send.peer().stage], send.kind) for send in sends}
    return sorted(keys, key=lambda key: (key[0], key[1], key[2].value))


class Executor:
    """One rank's row, bound to its stages, channels and buffers."""

    def __init__(
        self,
        schedule: Schedule,
        *,
        rank: int,
        stages: Mapping[int, Stage],
        channels: Mapping[ChannelKey, Channel],
        buffers: Buffers | None,
        post: Callable[[int], None] | None = None,
    ) -> None:
        """Bind every action.

        Args:
            schedule: a lowered table; one without any backward runs without autograd.
            rank: this rank of the pipeline.
            stages: by number, those on this rank.
            channels: by key, those that this rank is an end of.
            buffers: what is received; None where nothing is.
            post: told the position of each action before it runs.
        """
        self._schedule, self._rank = schedule, rank
        self._stages, self._channels, self._buffers = stages, channels, buffers
        self._post = post
        self._with_grad = any(action.kind in BACKWARDS for _, _, action in schedule.positions())
        self._anchor = torch.zeros((), requires_grad=self._with_grad)
        self._live = _Live()
        self._row = [part for action in schedule.actions[rank] for part in action.parts()]
        self._operations = [self._bind(position, action) for position, action in enumerate(self._row)]

    def run(self) -> None:
        """Run the row once."""
        with torch.set_grad_enabled(self._with_grad):
            if self._post is None:
                for operation in self._operations:
                    operation()
            else:
                for position, operation in enumerate(self._operations):
                    self._post(position)
                    operation()
        self._live.finish()

    def run_traced(self, *, synchronize: Callable[[], None]) -> list[Span]:
        """Run the row once, and say when each computation ran, in seconds of `time.perf_counter`.

        Args:
            synchronize: waits for the device.
        """
        spans = []
        with torch.set_grad_enabled(self._with_grad):
            for position, (action, operation) in enumerate(zip(self._row, self._operations, strict=True)):
                if self._post is not None:
                    self._post(position)
                if action.kind not in COMPUTE:
                    operation()
                    continue
                self._live.await_input(action)
                synchronize()
                start = time.perf_counter()
                operation()
                synchronize()
                spans.append(Span(self._rank, action, start, time.perf_counter()))
        self._live.finish()
        return spans

    def _bind(self, position: int, action: Action) -> Operation:
        if action.kind in COMPUTE:
            return {
                K.FORWARD: self._bind_forward,
                K.BACKWARD: self._bind_backward,
                K.BACKWARD_INPUT: self._bind_backward,
                K.BACKWARD_WEIGHT: self._bind_weights,
            }[action.kind](position, action)
        if action.kind in (K.SEND_FORWARD, K.SEND_BACKWARD):
            return self._bind_send(action)
        if action.kind in (K.RECV_FORWARD, K.RECV_BACKWARD):
            return self._bind_receive(action)
        if action.kind in (K.FREE_INPUT, K.FREE_OUTPUT, K.FREE_GRADIENT):
            return self._bind_free(action)
        stage = self._stages[action.stage]
        if action.kind is K.REDUCE:
            done = self._reduces_within(self._last_compute(position, action.stage))
            return lambda: stage.reduce(done=done)
        if action.kind is K.SYNC_SHARED:
            number = sum(other.kind is K.SYNC_SHARED for other in self._row[:position])
            return lambda: stage.sync_shared(number)
        return {K.UNSHARD: stage.unshard, K.RESHARD: stage.reshard}[action.kind]

    def _bind_forward(self, position: int, action: Action) -> Operation:
        stage, live, with_grad = self._stages[action.stage], self._live, self._with_grad
        number, m = action.stage, action.microbatch
        key = (number, m)
        is_first, is_last = number == 0, number == self._schedule.num_stages - 1
        anchor, buffers = self._anchor, self._buffers

        def forward() -> None:
            x = None
            if not is_first:
                live.await_input(action)
                x = live.inputs[key] if received else live.inputs.pop(key)
                if with_grad:
                    entry = live.entries[key] = _Gradient()
                    x = _Entry.apply(x, anchor, entry)  # type: ignore[no-untyped-call]
            y = stage.forward(m, x)
            if with_grad:
                live.edges[key] = get_gradient_edge(y) if y.requires_grad else None
            if not is_last:
                y = y.detach()
                if buffers is not None:
                    buffers.check_output(number, y)
                    y = buffers.outside(y)
                live.give_output(key, y, hands_over=hands_over)

        received = self._schedule.is_transfer(number - 1)
        hands_over = not self._schedule.is_transfer(number)
        return forward

    def _bind_backward(self, position: int, action: Action) -> Operation:
        stage, live = self._stages[action.stage], self._live
        number, m = action.stage, action.microbatch
        key, before = (number, m), (number - 1, m)
        is_first, is_last = number == 0, number == self._schedule.num_stages - 1
        received = self._schedule.is_transfer(number)
        hands_over = not self._schedule.is_transfer(number - 1)
        reduces = self._reduces_within(position)
        store, buffers = stage.weight_gradients if action.kind is K.BACKWARD_INPUT else None, self._buffers

        def backward() -> None:
            gradient = None
            if not is_last:
                live.await_input(action)
                gradient = live.gradients[key] if received else live.gradients.pop(key)
            stage.before_backward(reduces=reduces)
            edge = live.edges.pop(key)
            if edge is not None and store is None:
                torch.autograd.backward((edge,), (gradient,))
            elif edge is not None and store is not None:
                store.defers = True
                torch.autograd.backward((edge,), (gradient,))
                store.defers = False
                live.weights[key] = store.take()
            if not is_first:
                given = live.entries.pop(key).value
                if buffers is not None:
                    given = buffers.outside(given)
                if hands_over:
                    live.gradients[before] = given
                else:
                    live.to_send[K.SEND_BACKWARD, *key] = given

        return backward

    def _bind_weights(self, position: int, action: Action) -> Operation:
        live, key = self._live, (action.stage, action.microbatch)
        return lambda: compute_deferred(live.weights.pop(key, ()))

    def _bind_send(self, action: Action) -> Operation:
        live, key = self._live, (action.kind, action.stage, action.microbatch)
        ranks = self._schedule.stage_ranks
        lane = (self._rank, ranks[action.peer().stage], action.kind)
        channel = self._channels[lane]

        def send() -> None:
            x = _plain(live.to_send.pop(key))
            if action.kind is K.SEND_BACKWARD:
                live.sent(lane, x, channel.send(x))
            else:
                live.outgoing[action.stage, action.microbatch] = (x, channel.send(x))

        return send

    def _bind_receive(self, action: Action) -> Operation:
        live, key = self._live, (action.stage, action.microbatch)
        assert self._buffers is not None, "a table that receives needs buffers"
        view = self._buffers.view(action)
        channel = self._channels[
            self._schedule.stage_ranks[action.peer().stage],
            self._rank,
            action.peer().kind,
        ]
        target = live.inputs if action.kind is K.RECV_FORWARD else live.gradients

        def receive() -> None:
            target[key] = view
            live.arriving[action.kind, *key] = channel.receive(view)

        return receive

    def _bind_free(self, action: Action) -> Operation:
        live, buffers, key = self._live, self._buffers, (action.stage, action.microbatch)
        if action.kind is K.FREE_OUTPUT:
            return lambda: live.free_output(key)
        assert buffers is not None, "a table that frees what was received has buffers"
        source = live.inputs if action.kind is K.FREE_INPUT else live.gradients
        return lambda: buffers.free(source.pop(key))

    def _last_compute(self, position: int, stage: int) -> int:
        """Position of the stage's last computation before `position`."""
        return max(i for i in range(position) if self._row[i].stage == stage and self._row[i].kind in COMPUTE)

    def _reduces_within(self, position: int) -> bool:
        """Whether gradients are reduced within the backward at `position`: it is whole and the stage's last."""
        action = self._row[position]
        later = [other for other in self._row[position + 1 :] if other.stage == action.stage]
        is_last = not any(other.kind in COMPUTE for other in later)
        return action.kind is K.BACKWARD and is_last and any(other.kind is K.REDUCE for other in later)


class _Gradient:
    """Where an entry leaves the gradient of its input."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Any = None


class _Entry(torch.autograd.Function):
    """Where a micro-batch enters a stage: its input needs a gradient from here on, and this is where it comes out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, gradient: _Gradient) -> Tensor:
        ctx.gradient = gradient
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        (ctx.gradient.value,) = gradients
        return None, None, None


class _Live:
    """What a rank holds in the course of a step, by stage and micro-batch."""

    def __init__(self) -> None:
        self.inputs: dict[tuple[int, int], Tensor] = {}
        self.entries: dict[tuple[int, int], _Gradient] = {}
        self.edges: dict[tuple[int, int], GradientEdge | None] = {}
        """None where nothing is trained from the start to there."""
        self.gradients: dict[tuple[int, int], Tensor] = {}
        """Of a stage's outputs; like the inputs, until they are used or, if received, freed."""
        self.weights: dict[tuple[int, int], list[DeferredGradient]] = {}
        self.to_send: dict[tuple[ActionKind, int, int], Tensor] = {}
        self.outgoing: dict[tuple[int, int], tuple[Tensor, Transfer]] = {}
        """Outputs on their way, until they are freed."""
        self.arriving: dict[tuple[ActionKind, int, int], Transfer] = {}
        self._lanes: dict[ChannelKey, list[tuple[Tensor, Transfer]]] = defaultdict(list)

    def give_output(self, key: tuple[int, int], y: Tensor, *, hands_over: bool) -> None:
        """Pass on what a forward gave, detached: to the next stage here, or to its send."""
        stage, m = key
        if hands_over:
            self.inputs[stage + 1, m] = _plain(y)
        else:
            self.to_send[K.SEND_FORWARD, stage, m] = y

    def await_input(self, action: Action) -> None:
        """Wait for what a forward or a backward needs to have arrived."""
        if action.kind is K.BACKWARD_WEIGHT:
            return
        kind = K.RECV_FORWARD if action.kind is K.FORWARD else K.RECV_BACKWARD
        work = self.arriving.pop((kind, action.stage, action.microbatch), None)
        if work is not None:
            work.wait()

    def sent(self, lane: ChannelKey, x: Tensor, work: Transfer) -> None:
        """Hold a gradient until it is sent, which is when the next one on its channel is."""
        for _, earlier in self._lanes.pop(lane, []):
            earlier.wait()
        self._lanes[lane].append((x, work))

    def free_output(self, key: tuple[int, int]) -> None:
        """Let go of an output, once it is sent."""
        _, work = self.outgoing.pop(key)
        work.wait()

    def finish(self) -> None:
        """The step is over."""
        for pending in self._lanes.values():
            for _, work in pending:
                work.wait()
        self._lanes.clear()
        self.gradients.clear()
        self.inputs.clear()


def _plain(x: Tensor) -> Tensor:
    """A contiguous tensor without a subclass around it, such as one that is still under way."""
    x = x if type(x) is Tensor else x.clone()
    return x.contiguous()
