"""Two tasks on one rank that take turns: one computes while an all-to-all of the other is in flight.

[Note: turns] A task runs until it calls `switch_task` or ends; then the other one runs. An all-to-all in flight calls
`switch_task` before it waits. Exactly one task runs at a time, and when it switches depends on nothing but the two
tasks, so all ranks that run the same pair enter their collectives in the same order, and results are the same as if the
tasks ran one after the other. On a GPU both tasks launch kernels on the same stream: while the stream would wait for an
all-to-all of one task, it already has the other task's kernels.

[Note: threads of a task] The first task runs on the calling thread, so its stack traces, thread-local contexts and
caches are as without overlap. The second runs on a helper thread with the caller's context variables, grad mode and
CUDA stream; other thread-local contexts, such as autocast and dispatch modes, must be entered within the task. A
backward of CUDA tensors runs on autograd's own thread for the device. PyTorch hands it the thread-local objects of the
thread that called backward, which is where the current task is kept. As there is one such thread per device, at most
one of the tasks may run a backward.

A task must not switch within a block that changes state shared with the other task, such as the random number
generator: the other task would run in the middle of the block.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Condition
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from meshwright.comm.private import clear_current_task, current_task, set_current_task

Task = Callable[[], None]
FIRST, SECOND = 0, 1


@runtime_checkable
class SwitchesTasks(Protocol):
    """A module that has all-to-alls in flight."""

    switches_tasks: bool
    """Whether its forward and backward call `switch_task`; False where the all-to-all has a single rank."""


class Seconds(NamedTuple):
    """Time in which each of two overlapped tasks had its turn, including its own waiting."""

    first: float
    second: float


def switch_task() -> None:
    """Let the other one of two overlapped tasks run, until it switches or ends; do nothing outside `run_overlapped`."""
    switch = current_task()
    if switch is not None:
        switch()


def helper_thread() -> ThreadPoolExecutor:
    """Return a thread for second tasks, which starts with the first task and ends with this object.

    Starting a thread is cheap, but DTensor and OpenMP fill caches per thread, so pairs should share one.
    """
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="overlap")


def run_overlapped(first: Task, second: Task, *, helper: ThreadPoolExecutor | None = None) -> Seconds:
    """Run two tasks that take turns at their calls of `switch_task`; the first one starts. [Note: turns]

    Within a task of another pair, the two tasks run one after the other, and their switches are those of that pair.

    Args:
        helper: an idle thread of `helper_thread`; a new one if None.

    Returns:
        How long each task had its turn.

    Raises:
        BaseException: the exception of the task that failed first. By then the other task has ended as well: its next
            call of `switch_task` raised.
    """
    if current_task() is not None:
        start = time.perf_counter()
        first()
        middle = time.perf_counter()
        second()
        return Seconds(middle - start, time.perf_counter() - middle)
    if helper is None:
        with helper_thread() as helper:
            return run_overlapped(first, second, helper=helper)
    pair = _Pair()
    ending = helper.submit(pair.run, SECOND, _in_callers_context(second))
    try:
        pair.run(FIRST, first)
        ending.result()
    except BaseException as interrupt:  # KeyboardInterrupt, while the first or the second task was ending
        pair.fail(interrupt)
        pair.end(FIRST)
        ending.result()
    return pair.finish()


def _in_callers_context(task: Task) -> Task:
    """Return the task with this thread's context, for another thread. [Note: threads of a task]"""
    context, with_grad = contextvars.copy_context(), torch.is_grad_enabled()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def run() -> None:
        with torch.set_grad_enabled(with_grad), torch.cuda.stream(stream):  # None leaves the stream as it is
            context.run(task)

    return run


class _Cancelled(BaseException):
    """Raised within a task whose partner failed. Not an Exception: nothing but `_Pair.run` should handle it."""


class _Pair:
    """Whose turn it is of two tasks."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._running = FIRST
        self._ended = [False, False]
        self._error: BaseException | None = None
        self._seconds = [0.0, 0.0]
        self._since = time.perf_counter()

    def run(self, index: int, task: Task) -> None:
        """Run a task when its turn comes; keep its exception for `finish`."""
        try:
            with self._changed:
                self._await_turn(index)
            set_current_task(partial(self.switch, index))
            try:
                task()
            finally:
                clear_current_task()
        except BaseException as error:
            self.fail(error)
        finally:
            self.end(index)

    def end(self, index: int) -> None:
        with self._changed:
            self._ended[index] = True
            if self._running == index:  # a task that was interrupted while waiting has no turn to pass on
                self._pass_turn(index)

    def switch(self, index: int) -> None:
        """Let the other task run until it switches or ends."""
        with self._changed:
            self._check()
            if not self._ended[1 - index]:
                self._pass_turn(index)
                self._await_turn(index)

    def fail(self, error: BaseException) -> None:
        """Keep the first exception of the pair; from then on, switching raises."""
        with self._changed:
            self._error = error if self._error is None else self._error

    def finish(self) -> Seconds:
        """Return the time of each task, or raise the exception of the one that failed first."""
        error, self._error = self._error, None
        if error is None:
            return Seconds(*self._seconds)
        try:
            raise error
        finally:
            del error  # the traceback refers to this frame, and would keep itself and all tensors alive

    def _pass_turn(self, index: int) -> None:
        now = time.perf_counter()
        self._seconds[index] += now - self._since
        self._since, self._running = now, 1 - index
        self._changed.notify_all()

    def _await_turn(self, index: int) -> None:
        self._changed.wait_for(lambda: self._running == index)
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise _Cancelled
