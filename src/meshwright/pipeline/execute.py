"""Executor of a lowered table on one rank: a flat loop over actions that are bound before the first step.

All policy is in the table. [Note: tensor lifetimes] Each micro-batch enters a stage through an autograd node
(`_InputNode`) that captures the input's gradient, so no leaf keeps the input alive. A stage's output is held only until
it has been sent or passed to the next stage, because the backward starts from its gradient edge, which holds no
storage. Tensors saved by autograd stay alive. With `pipeline.release=false` the table frees tensors only at the end.

[Note: which pairs overlap] The two computations of an `Overlap` (DualPipe; DeepSeek-AI 2024) take turns if either stage
has all-to-alls in flight, and otherwise run one after the other. Their stages must differ, since FSDP2's state and the
store of deferred gradients are per stage, and autograd allows one backward at a time (`comm/overlap.py`). Transfers
follow the pair, so turns can't cause a deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.comm.collectives import Channel, Transfer
from meshwright.comm.overlap import Seconds, helper_thread, run_overlapped
from meshwright.nn.linear import DeferredGradient, WeightGradStore, compute_deferred
from meshwright.pipeline.actions import BACKWARDS, COMPUTE, FREES, Action, ActionKind, Overlap
from meshwright.pipeline.receive_buffers import ReceiveBuffers
from meshwright.pipeline.schedule_table import Schedule
from meshwright.pipeline.timeline import ReadClocks, TimedOperation

K = ActionKind
ChannelKey = tuple[int, int, ActionKind]
"""Source and destination rank in the pipeline, and the kind of send."""

_SENT = {K.FREE_OUTPUT: K.SEND_FORWARD, K.FREE_INPUT_GRADIENT: K.SEND_BACKWARD}
"""Kind of the send that each of these frees waits for."""


class ExecutableStage(Protocol):
    """Interface that the executor requires of a stage."""

    weight_gradients: WeightGradStore | None
    """Store of deferred weight gradients; None if this stage's backward can't be split."""
    overlaps: bool
    """Whether its forward and backward have all-to-alls in flight, which another computation can hide."""

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor:
        """Return the stage's output, or the loss on the last stage; `x` is None on the first stage."""

    def before_backward(self, *, reduces: bool) -> None:
        """Prepare for a backward, which reduces gradients if `reduces` is True."""

    def reduce(self, *, done: bool) -> None:
        """Reduce the gradients of all micro-batches; `done` is True if the last backward already has."""

    def unshard(self) -> None:
        """Unshard the parameters and keep them until `reshard`."""

    def reshard(self) -> None:
        """Free the unsharded parameters."""

    def sync_shared(self, group_index: int) -> None:
        """Sum the gradients of a group of shared parameters; groups are numbered in the order of the rank's row."""


def channel_keys(schedule: Schedule) -> list[ChannelKey]:
    """Return the channels of a lowered table, in the same order on all ranks."""
    ranks = schedule.stage_ranks
    sends = (action for _, _, action in schedule.positions() if action.kind in (K.SEND_FORWARD, K.SEND_BACKWARD))
    keys = {(ranks[send.stage], ranks[send.peer().stage], send.kind) for send in sends}
    return sorted(keys, key=lambda key: (key[0], key[1], key[2].value))


class _Step(NamedTuple):
    """An operation of the flat loop; only an overlapped pair has two actions."""

    position: int
    actions: tuple[Action, ...]
    operation: Operation


class Executor:
    """Executor of one rank's row, bound to the rank's stages, channels and buffers."""

    def __init__(
        self,
        schedule: Schedule,
        *,
        rank: int,
        stages: Mapping[int, ExecutableStage],
        channels: Mapping[ChannelKey, Channel],
        buffers: ReceiveBuffers | None,
        post: Callable[[int], None] | None = None,
    ) -> None:
        """Bind all actions.

        Args:
            schedule: a lowered table; a table without backwards runs under no_grad.
            buffers: receive buffers; None if nothing is received.
            post: callback with each action's position before the action runs.
        """
        self._schedule, self.rank = schedule, rank
        self._stages, self._channels, self._buffers = stages, channels, buffers
        self._post = post
        self._with_grad = any(action.kind in BACKWARDS for _, _, action in schedule.positions())
        self._anchor = torch.zeros((), requires_grad=self._with_grad)
        self._live = _StepState()
        self._row = [part for action in schedule.actions[rank] for part in action.parts()]
        self._steps = list(self._bind_row())

    def run(self, label: Callable[[str], AbstractContextManager[object]] | None = None) -> None:
        """Run the row once, each operation in the context `label` makes of its actions, such as `0F3`."""
        with torch.set_grad_enabled(self._with_grad):
            for position, actions, operation in self._steps:
                if self._post is not None:
                    self._post(position)
                with nullcontext() if label is None else label("+".join(map(str, actions))):
                    operation()
        self._live.finish()

    def run_timed(self, read: ReadClocks) -> list[TimedOperation]:
        """Run the row once, and return the times of each operation, in order.

        Args:
            read: function that reads this thread's clocks; on a GPU, after waiting for it.
        """
        timed = []
        with torch.set_grad_enabled(self._with_grad):
            for position, actions, operation in self._steps:
                if self._post is not None:
                    self._post(position)
                before = start = read()
                if actions[0].kind in COMPUTE:
                    for action in actions:
                        self._live.await_input(action)
                    start = read()
                operation()
                end = read()
                turns = operation.split(start.wall, end.wall) if isinstance(operation, OverlappedPair) else None
                timed.append(TimedOperation(actions, before, start, end, turns))
        self._live.finish()
        return timed

    def buffer_bytes(self) -> int:
        return 0 if self._buffers is None else self._buffers.num_bytes()

    def _bind_row(self) -> Iterator[_Step]:
        helper, position = helper_thread(), 0
        overlapping = {number for number, stage in self._stages.items() if stage.overlaps}
        for action in self._schedule.actions[self.rank]:
            parts = action.parts()
            operations = [self._bind(position + at, part) for at, part in enumerate(parts)]
            if isinstance(action, Overlap) and takes_turns(action, overlapping):
                first, second = operations
                pair = OverlappedPair((first, second), position=position, post=self._post, helper=helper)
                yield _Step(position, parts, pair)
            else:
                for at, (part, operation) in enumerate(zip(parts, operations, strict=True)):
                    yield _Step(position + at, (part,), operation)
            position += len(parts)

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
        if action.kind in FREES:
            return self._bind_free(action)
        stage = self._stages[action.stage]
        if action.kind is K.REDUCE:
            done = self._reduces_within(self._last_compute(position, action.stage))
            return lambda: stage.reduce(done=done)
        if action.kind is K.SYNC_SHARED:
            group_index = sum(earlier.kind is K.SYNC_SHARED for earlier in self._row[:position])
            return lambda: stage.sync_shared(group_index)
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
                    captured = live.input_gradients[key] = _CapturedGradient()
                    x = _InputNode.apply(x, anchor, captured)  # type: ignore[no-untyped-call]
            y = stage.forward(m, x)
            if with_grad:
                live.edges[key] = get_gradient_edge(y) if y.requires_grad else None
            if not is_last:
                y = y.detach()
                if buffers is not None:
                    buffers.check_output(number, y)
                    y = buffers.copy_if_slot(y)
                live.pass_output(key, y, is_next_local=is_next_local)

        received = self._schedule.is_transfer(number - 1)
        is_next_local = not self._schedule.is_transfer(number)
        return forward

    def _bind_backward(self, position: int, action: Action) -> Operation:
        stage, live = self._stages[action.stage], self._live
        number, m = action.stage, action.microbatch
        key, previous_key = (number, m), (number - 1, m)
        is_first, is_last = number == 0, number == self._schedule.num_stages - 1
        received = self._schedule.is_transfer(number)
        is_previous_local = not self._schedule.is_transfer(number - 1)
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
                input_gradient = live.input_gradients.pop(key).value
                if buffers is not None:
                    input_gradient = buffers.copy_if_slot(input_gradient)
                if is_previous_local:
                    live.gradients[previous_key] = input_gradient
                else:
                    live.to_send[K.SEND_BACKWARD, *key] = input_gradient

        return backward

    def _bind_weights(self, position: int, action: Action) -> Operation:
        live, key = self._live, (action.stage, action.microbatch)
        return lambda: compute_deferred(live.weights.pop(key, ()))

    def _bind_send(self, action: Action) -> Operation:
        live, key = self._live, (action.kind, action.stage, action.microbatch)
        ranks = self._schedule.stage_ranks
        channel = self._channels[self.rank, ranks[action.peer().stage], action.kind]

        def send() -> None:
            x = _contiguous(live.to_send.pop(key))
            live.outgoing[key] = (x, channel.send(x))

        return send

    def _bind_receive(self, action: Action) -> Operation:
        live, key = self._live, (action.stage, action.microbatch)
        assert self._buffers is not None, "a table with receives needs buffers"
        view = self._buffers.view(action)
        channel = self._channels[self._schedule.stage_ranks[action.peer().stage], self.rank, action.peer().kind]
        target = live.inputs if action.kind is K.RECV_FORWARD else live.gradients

        def receive() -> None:
            target[key] = view
            live.arriving[action.kind, *key] = channel.receive(view)

        return receive

    def _bind_free(self, action: Action) -> Operation:
        live, buffers, key = self._live, self._buffers, (action.stage, action.microbatch)
        if action.kind in _SENT:
            return lambda: live.free_sent((_SENT[action.kind], *key))
        assert buffers is not None, "a table that frees received tensors needs buffers"
        source = live.inputs if action.kind is K.FREE_INPUT else live.gradients
        return lambda: buffers.free(source.pop(key))

    def _last_compute(self, position: int, stage: int) -> int:
        """Return the position of the stage's last computation before `position`."""
        return max(i for i in range(position) if self._row[i].stage == stage and self._row[i].kind in COMPUTE)

    def _reduces_within(self, position: int) -> bool:
        """Return True if the action at `position` is the stage's last backward, not split, and a REDUCE follows."""
        action = self._row[position]
        following = [later for later in self._row[position + 1 :] if later.stage == action.stage]
        is_last = not any(later.kind in COMPUTE for later in following)
        return action.kind is K.BACKWARD and is_last and any(later.kind is K.REDUCE for later in following)


class _CapturedGradient:
    """Gradient of a stage's input, set by the backward of `_InputNode`."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Any = None


class _InputNode(torch.autograd.Function):
    """Identity on a stage's input that makes it require grad and captures its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, gradient: _CapturedGradient) -> Tensor:
        ctx.gradient = gradient
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        (ctx.gradient.value,) = gradients
        return None, None, None


class _StepState:
    """Tensors and transfers that a rank holds during a step, by stage and micro-batch."""

    def __init__(self) -> None:
        self.inputs: dict[tuple[int, int], Tensor] = {}
        self.input_gradients: dict[tuple[int, int], _CapturedGradient] = {}
        self.edges: dict[tuple[int, int], GradientEdge | None] = {}
        """Gradient edges of the outputs; None if no parameter up to that stage is trained."""
        self.gradients: dict[tuple[int, int], Tensor] = {}
        """Output gradients. Like inputs, held until used or, if received, until freed."""
        self.weights: dict[tuple[int, int], list[DeferredGradient]] = {}
        self.to_send: dict[tuple[ActionKind, int, int], Tensor] = {}
        self.outgoing: dict[tuple[ActionKind, int, int], tuple[Tensor, Transfer]] = {}
        """Outputs and gradients of inputs being sent, until freed."""
        self.arriving: dict[tuple[ActionKind, int, int], Transfer] = {}

    def pass_output(self, key: tuple[int, int], y: Tensor, *, is_next_local: bool) -> None:
        """Pass a detached output to the next stage on this rank, or queue it for sending."""
        stage, m = key
        if is_next_local:
            self.inputs[stage + 1, m] = _contiguous(y)
        else:
            self.to_send[K.SEND_FORWARD, stage, m] = y

    def await_input(self, action: Action) -> None:
        """Wait for the received input of a forward or backward to arrive."""
        if action.kind is K.BACKWARD_WEIGHT:
            return
        kind = K.RECV_FORWARD if action.kind is K.FORWARD else K.RECV_BACKWARD
        work = self.arriving.pop((kind, action.stage, action.microbatch), None)
        if work is not None:
            work.wait()

    def free_sent(self, key: tuple[ActionKind, int, int]) -> None:
        _, work = self.outgoing.pop(key)
        work.wait()

    def finish(self) -> None:
        """Release everything at the end of a step."""
        self.gradients.clear()
        self.inputs.clear()


def _contiguous(x: Tensor) -> Tensor:
    """Return `x` as a contiguous plain tensor, copying subclasses such as a pending AsyncCollectiveTensor."""
    x = x if type(x) is Tensor else x.clone()
    return x.contiguous()


Operation = Callable[[], None]
Post = Callable[[int], None]


def takes_turns(pair: Overlap, overlapping: Collection[int]) -> bool:
    """Return True if a pair takes turns, given the stages with all-to-alls. [Note: which pairs overlap]"""
    stages = {part.stage for part in pair.parts()}
    num_backwards = sum(part.kind in BACKWARDS for part in pair.parts())
    return len(stages) == 2 and num_backwards <= 1 and not stages.isdisjoint(overlapping)


class OverlappedPair:
    """Operation that runs two computations, each while the other waits for an all-to-all."""

    def __init__(
        self, operations: tuple[Operation, Operation], *, position: int, post: Post | None, helper: ThreadPoolExecutor
    ) -> None:
        """Bind the pair; `post` gets the position of the second before it starts, and the caller posts the first."""
        self._operations, self._position, self._helper = operations, position, helper
        self._post: Post = (lambda position: None) if post is None else post
        self._seconds = Seconds(0.0, 0.0)

    def __call__(self) -> None:
        self._seconds = run_overlapped(self._first, self._second, helper=self._helper)

    def split(self, start: float, end: float) -> float:
        """Return the time between `start` and `end` that divides the pair's time by the turns of its last run."""
        first, second = self._seconds
        return start + (end - start) * first / (first + second)

    def _first(self) -> None:
        try:
            self._operations[0]()
        except Exception:
            self._post(self._position)  # by now the second may have posted its position
            raise

    def _second(self) -> None:
        self._post(self._position + 1)
        self._operations[1]()
