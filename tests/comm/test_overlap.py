"""Overlapped tasks: their order and simulated time, failures, threads and contexts."""

from __future__ import annotations

import contextvars
import ctypes
import gc
import signal
import sys
import threading
import traceback
import weakref

import pytest
import torch

from meshwright.comm.overlap import helper_thread, run_overlapped, switch_task
from meshwright.comm.private import clear_current_task, current_task, set_current_task
from tests.comm.virtual_clock import VirtualClock


def expert_layers(clock, name, num_layers, *, compute, all_to_all):
    """Return a task like a stage of expert layers: attention, dispatch, experts, combine."""

    def task():
        for layer in range(num_layers):
            clock.compute(f"{name}{layer}", compute)
            clock.all_to_all(f"{name}{layer} dispatch", all_to_all)
            clock.compute(f"{name}{layer} experts", compute)
            clock.all_to_all(f"{name}{layer} combine", all_to_all)

    return task


def makespan(*tasks, clock):
    start = clock.now
    run_overlapped(*tasks) if len(tasks) == 2 else tasks[0]()
    return clock.now - start


def test_one_computes_while_the_other_s_all_to_all_is_in_flight():
    clock = VirtualClock()
    tasks = [expert_layers(clock, name, 1, compute=1.0, all_to_all=1.0) for name in "FB"]
    run_overlapped(*tasks)
    assert clock.events == [
        "compute F0", "start F0 dispatch",
        "compute B0", "start B0 dispatch",
        "done F0 dispatch", "compute F0 experts", "start F0 combine",
        "done B0 dispatch", "compute B0 experts", "start B0 combine",
        "done F0 combine",
        "done B0 combine",
    ]  # fmt: skip
    assert clock.now == 5.0  # four computations, and the last all-to-all


@pytest.mark.parametrize("compute_b", [1.0, 2.0])
def test_a_pair_takes_at_most_0_7_of_the_sum(compute_b):
    """With all-to-alls as long as the computations of a forward; a backward computes up to twice as long."""
    clock = VirtualClock()
    first = expert_layers(clock, "F", 4, compute=1.0, all_to_all=1.0)
    second = expert_layers(clock, "B", 4, compute=compute_b, all_to_all=1.0)
    alone = makespan(first, clock=clock) + makespan(second, clock=clock)
    pair = makespan(first, second, clock=clock)
    assert pair <= 0.7 * alone
    assert pair <= 8.0 * (1 + compute_b) + 1.0  # every all-to-all but the last is hidden


def test_a_task_goes_on_alone_when_the_other_has_ended():
    clock = VirtualClock()
    long = expert_layers(clock, "F", 2, compute=1.0, all_to_all=1.0)
    run_overlapped(long, lambda: clock.compute("B", 0.5))
    assert clock.events[:4] == ["compute F0", "start F0 dispatch", "compute B", "done F0 dispatch"]
    clock.events.clear()
    run_overlapped(lambda: clock.compute("F", 0.5), long)
    assert clock.events[:3] == ["compute F", "compute F0", "start F0 dispatch"]


def test_the_order_is_always_the_same():
    orders = set()
    for _ in range(50):
        clock = VirtualClock()
        run_overlapped(*(expert_layers(clock, name, 3, compute=1.0, all_to_all=1.0) for name in "FB"))
        orders.add(tuple(clock.events))
    assert len(orders) == 1


def test_switching_alone_does_nothing():
    switch_task()
    assert current_task() is None
    run_overlapped(lambda: None, lambda: None)
    assert current_task() is None


def test_a_pair_within_a_task_runs_one_after_the_other():
    """Its switches are those of the outer pair."""
    clock = VirtualClock()

    def outer():
        run_overlapped(*(expert_layers(clock, name, 1, compute=1.0, all_to_all=1.0) for name in "ab"))

    with helper_thread() as helper:
        run_overlapped(outer, expert_layers(clock, "B", 1, compute=1.0, all_to_all=1.0), helper=helper)
    assert [event for event in clock.events if "a0" in event][-1] == "done a0 combine"
    assert clock.events.index("compute b0") > clock.events.index("done a0 combine")
    assert clock.events.index("compute B0") < clock.events.index("done a0 dispatch")


# ---- failures


class Broken(Exception):
    pass


def fails():
    raise Broken


def switching(log, name, num_switches=3):
    def task():
        try:
            for number in range(num_switches):
                log.append(f"{name}{number}")
                switch_task()
        finally:
            log.append(f"{name} ends")

    return task


def failing(log, name, after):
    def task():
        switching(log, name, after)()
        fails()

    return task


def threads():
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("overlap")}


@pytest.mark.parametrize("after", [0, 1, 2, 5])
@pytest.mark.parametrize("which", [0, 1])
def test_the_first_exception_is_raised_and_both_tasks_end(which, after):
    log = []
    tasks = [switching(log, "F"), switching(log, "B")]
    tasks[which] = failing(log, "FB"[which], after)
    with helper_thread() as helper:
        with pytest.raises(Broken) as caught:
            run_overlapped(*tasks, helper=helper)
        assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "fails"
        assert current_task() is None and caught.value.__context__ is None
        assert log[-1].endswith("ends")  # one that failed before the other started leaves nothing to end
        assert sum(entry == f"{'BF'[which]} ends" for entry in log) <= 1
        clock = VirtualClock()  # the thread is as good as new
        run_overlapped(lambda: clock.compute("F", 1.0), lambda: clock.compute("B", 1.0), helper=helper)
        assert clock.now == 2.0
    assert not threads()


def test_a_task_does_not_start_after_the_other_failed():
    log = []
    with pytest.raises(Broken):
        run_overlapped(fails, switching(log, "B"))
    assert not log


def test_the_other_task_is_stopped_at_its_next_switch():
    log = []
    with pytest.raises(Broken):
        run_overlapped(switching(log, "F"), failing(log, "B", 1))
    assert log == ["F0", "B0", "F1", "B ends", "F ends"]


def test_a_second_failure_while_ending_is_not_reported():
    def ends_badly():
        try:
            switch_task()
        finally:
            raise ValueError

    with pytest.raises(Broken):
        run_overlapped(ends_badly, fails)


def test_a_task_that_ignores_its_end_still_ends():
    def stubborn():
        for _ in range(3):
            try:
                switch_task()
            except BaseException:
                continue

    with pytest.raises(Broken):
        run_overlapped(stubborn, fails)


@pytest.fixture
def interrupts():
    """The interrupts of the main thread: the first SIGINT raises KeyboardInterrupt, also in a test worker."""
    handled = []

    def handle(number, frame):
        handled.append(number)
        if len(handled) == 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    yield handled
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("first", [switch_task, lambda: None], ids=["for its turn", "for the second task to end"])
def test_an_interrupt_while_waiting_ends_both_tasks(interrupts, first):
    log = []

    def second():
        while not interrupts:  # a signal just before the main thread waits doesn't wake it
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            threading.Event().wait(0.01)
        for _ in range(100):
            threading.Event().wait(0.01)  # until the main thread has left its wait
            switch_task()
        log.append("not stopped")

    with pytest.raises(KeyboardInterrupt):
        run_overlapped(first, second)
    assert not log and not threads()


def test_a_failure_keeps_no_tensors_alive():
    tensors = []

    def second():
        x = torch.ones(3)
        tensors.append(weakref.ref(x))
        fails()

    gc.disable()
    try:
        with pytest.raises(Broken) as caught:
            run_overlapped(switch_task, second)
        del caught
        assert tensors[0]() is None
    finally:
        gc.enable()


# ---- threads


def test_the_second_task_has_the_caller_s_contexts():
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(1)
    seen = []

    def look():
        seen.append((torch.is_grad_enabled(), variable.get()))

    with torch.no_grad():
        run_overlapped(look, look)
    run_overlapped(look, look)
    assert seen == [(False, 1), (False, 1), (True, 1), (True, 1)]


def test_contexts_that_are_open_at_a_switch_stay_with_their_task():
    seen = []

    def without_grad():
        with torch.no_grad():
            switch_task()
            seen.append(torch.is_grad_enabled())

    def look():
        seen.append(torch.is_grad_enabled())
        switch_task()
        seen.append(torch.is_grad_enabled())

    run_overlapped(without_grad, look)
    assert seen == [True, False, True]


class Switches(torch.autograd.Function):
    """Identity whose backward switches."""

    @staticmethod
    def forward(ctx, x, log, name):
        ctx.log, ctx.name = log, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.log.append(f"{ctx.name} starts")
        switch_task()
        ctx.log.append(f"{ctx.name} ends")
        return gradient, None, None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_backward_switches_too(device):
    """On a GPU it runs on autograd's own thread."""
    log = []
    x = torch.ones(3, device=device, requires_grad=True)
    y = Switches.apply(Switches.apply(x, log, "B1"), log, "B0").sum()

    def forward():
        for number in range(3):
            log.append(f"F{number}")
            switch_task()

    run_overlapped(forward, y.backward)
    assert log == ["F0", "B0 starts", "F1", "B0 ends", "B1 starts", "F2", "B1 ends"]
    assert torch.equal(x.grad, torch.ones_like(x)) and current_task() is None


def test_a_task_is_kept_by_versions_that_take_no_reference(monkeypatch):
    """PyTorch 2.11 releases a reference that it has not taken: the task's own would go."""
    stash, task = torch._C._stash_obj_in_tls, object()
    before = sys.getrefcount(task)

    def takes_none(key, item):
        references = sys.getrefcount(item)
        stash(key, item)
        for _ in range(sys.getrefcount(item) - references):
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(item))

    monkeypatch.setattr(torch._C, "_stash_obj_in_tls", takes_none)
    set_current_task(task)
    kept = sys.getrefcount(task)
    clear_current_task()
    assert (kept, sys.getrefcount(task)) == (before + 1, before)


@pytest.mark.gpu
def test_the_second_task_has_the_caller_s_stream():
    streams = []
    with torch.cuda.stream(torch.cuda.Stream()):
        run_overlapped(*[lambda: streams.append(torch.cuda.current_stream())] * 2)
        assert streams == [torch.cuda.current_stream()] * 2
