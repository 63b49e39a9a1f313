"""Streams that run nothing until a test says so, in any order that their events allow; memory is real tensors.

What the host launches is a list of operations a stream. An operation reads and writes its memory when it runs, so a
wait that was left out shows as wrong values where the order is unlucky. The allocator gives freed memory of the copy
stream to the stream's next allocation at once, unless another stream was said to use it: as CUDA's does.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

COPY, COMPUTE = "copy", "compute"


class Wait(Enum):
    """The three waits, by the operation of `Streams` that makes each."""

    COMPUTE_FOR_COPY = "compute_waits"
    HOST_FOR_COPY = "host_waits"
    ALLOCATOR_FOR_COMPUTE = "keep_for_compute"


class Order(Enum):
    """Which stream's next operation runs, where both could."""

    COPIES_LAST = "copies last"
    COMPUTE_LAST = "compute last"
    RANDOM = "random"


@dataclass
class FakeEvent:
    """An event, which has happened once the stream has run so far."""

    happened: bool = False


@dataclass
class _Block:
    """Device memory, and the streams that use it besides the copy stream that it belongs to."""

    memory: Tensor
    used_by_compute: bool = False
    until: FakeEvent = field(default_factory=lambda: FakeEvent(happened=True))


class FakeStreams:
    """A copy stream and a compute stream; `without` leaves out a wait."""

    def __init__(self, order: Order, *, seed: int = 0, without: Wait | None = None) -> None:
        self._order, self._random, self._without = order, random.Random(seed), without
        self._queues: dict[str, deque[Callable[[], bool]]] = {COPY: deque(), COMPUTE: deque()}
        self._free: list[_Block] = []
        self._blocks: dict[int, _Block] = {}
        self.num_pinned = self.num_blocks = 0

    # ---- the interface

    def pinned_like(self, x: Tensor) -> Tensor:
        self.num_pinned += 1
        return torch.empty_like(x)

    def empty_like(self, x: Tensor) -> Tensor:
        block = next((b for b in self._free if b.until.happened and b.memory.shape == x.shape), None)
        if block is None:
            block = _Block(torch.full_like(x, -1))
            self.num_blocks += 1
        else:
            self._free.remove(block)
        handed_out = block.memory.view_as(block.memory)  # a new tensor on the same memory
        self._blocks[id(handed_out)] = block
        weakref.finalize(handed_out, self._release, id(handed_out))
        return handed_out

    def copy(self, source: Tensor, target: Tensor) -> None:
        memory = target.detach()  # doesn't keep `target` itself: the allocator sees that it is freed
        self._launch(COPY, lambda: memory.copy_(source))

    def copy_event(self) -> FakeEvent:
        return self._record(COPY)

    def compute_waits(self, event: FakeEvent) -> None:
        if self._without is not Wait.COMPUTE_FOR_COPY:
            self._queues[COMPUTE].append(lambda: event.happened)

    def host_waits(self, event: FakeEvent) -> None:
        if self._without is not Wait.HOST_FOR_COPY:
            while not event.happened:
                assert self._run_one(), "the host waits for ever"

    def keep_for_compute(self, x: Tensor) -> None:
        if self._without is not Wait.ALLOCATOR_FOR_COMPUTE:
            self._blocks[id(x)].used_by_compute = True

    # ---- for tests

    def read_later(self, x: Tensor, found: list[Tensor]) -> None:
        """Launch work on the compute stream that reads `x`; frees nothing and keeps nothing, like a kernel."""
        memory = x.detach()
        self._launch(COMPUTE, lambda: found.append(memory.clone()))

    def progress(self, count: int) -> None:
        """Run up to `count` operations."""
        for _ in range(count):
            if not self._run_one():
                return

    def finish(self) -> None:
        """Run everything."""
        while self._run_one():
            pass
        assert not any(self._queues.values()), "the streams wait for each other"

    def _launch(self, stream: str, work: Callable[[], object]) -> None:
        def operation() -> bool:
            work()
            return True

        self._queues[stream].append(operation)

    def _record(self, stream: str) -> FakeEvent:
        event = FakeEvent()
        self._launch(stream, lambda: setattr(event, "happened", True))
        return event

    def _release(self, key: int) -> None:
        block = self._blocks.pop(key)
        if block.used_by_compute:
            block.until, block.used_by_compute = self._record(COMPUTE), False
        self._free.append(block)

    def _run_one(self) -> bool:
        """Run the next operation of a stream, and return whether there was one that can run."""
        names = [COMPUTE, COPY]
        if self._order is Order.COMPUTE_LAST:
            names.reverse()
        elif self._order is Order.RANDOM:
            self._random.shuffle(names)
        for name in names:
            queue = self._queues[name]
            if queue and queue[0]():
                queue.popleft()
                return True
        return False
