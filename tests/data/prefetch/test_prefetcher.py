"""A prefetcher gives each key's value in order, never makes more than allowed, and ends with its context."""

from __future__ import annotations

import threading
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data import prefetch as module
from meshwright.data.prefetch import Prefetcher
from meshwright.errors import DataError


def workers():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


class Gate:
    """A source that makes a value only when it is let, and tells that it has begun."""

    def __init__(self, error=None):
        self.begun, self.go, self.error = threading.Event(), threading.Event(), error

    def make(self, key):
        self.begun.set()
        assert self.go.wait(60)
        return key


@given(count=st.integers(0, 20), ahead=st.integers(1, 5), taken=st.integers(0, 20))
def test_values_come_in_order_and_no_thread_is_left(count, ahead, taken):
    taken = min(count, taken)
    with Prefetcher(range(count), lambda key: key * key, ahead=ahead) as values:
        assert [values.take(key) for key in range(taken)] == [key * key for key in range(taken)]
    assert not workers()


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_at_most_so_many_are_made_before_they_are_taken(ahead):
    made, taken, most = 0, 0, 0
    reached = threading.Semaphore(0)

    def make(key):
        nonlocal made, most
        made += 1
        most = max(most, made - taken)
        reached.release()
        return key

    with Prefetcher(range(30), make, ahead=ahead) as values:
        for key in range(30):
            for _ in range(ahead if not key else int(key + ahead <= 30)):
                assert reached.acquire(timeout=60)  # as many as are allowed are made without being taken
            assert made == min(30, key + ahead)
            taken += 1  # before the value makes room
            values.take(key)
    assert most == ahead


def read_the_source(key):
    if key == 2:
        raise OSError(5, "the disk is gone")
    return key


def test_an_exception_reaches_the_step_that_needs_the_value_with_its_trace():
    with Prefetcher(range(5), read_the_source, ahead=4) as values:
        assert [values.take(0), values.take(1)] == [0, 1]
        for _ in range(2):  # the worker has ended: asked again, the same
            with pytest.raises(OSError, match="the disk is gone") as raised:
                values.take(2)
        frames = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
        assert "read_the_source" in frames and frames[0] == raised.traceback[0].name
    assert not workers()


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_an_exit_of_the_source_is_no_silent_end(kind):
    def make(key):
        raise kind

    with Prefetcher([0], make, ahead=1) as values, pytest.raises(kind):
        values.take(0)


def test_an_error_for_the_user_arrives_unchanged():
    error = DataError("a file is damaged", where="data.source", rule="files are whole", fix="another file")

    def make(key):
        raise error

    with Prefetcher([0], make, ahead=1) as values, pytest.raises(DataError) as raised:
        values.take(0)
    assert raised.value is error


def test_an_exception_in_the_step_ends_the_worker():
    with pytest.raises(ValueError, match="in the step"), Prefetcher(range(100), abs, ahead=2) as values:
        values.take(0)
        raise ValueError("in the step")
    assert not workers()


def test_the_worker_in_the_middle_of_a_value_is_waited_for():
    gate = Gate()
    with Prefetcher(range(9), gate.make, ahead=2):
        assert gate.begun.wait(60)
        threading.Timer(0.05, gate.go.set).start()
    assert not workers()


def test_a_source_that_never_ends_does_not_hold_up_the_end(monkeypatch, caplog):
    monkeypatch.setattr(module, "END_S", 0.01)
    gate = Gate()
    with Prefetcher(range(9), gate.make, ahead=2):
        assert gate.begun.wait(60)
    (left,) = workers()
    assert left.daemon and "still reading" in caplog.text
    gate.go.set()
    left.join(60)
    assert not workers()


def test_values_are_taken_in_their_order():
    with Prefetcher(range(3), abs, ahead=2) as values, pytest.raises(AssertionError, match="order of their keys"):
        values.take(1)


def test_more_values_than_keys_are_a_bug_and_no_hang():
    with Prefetcher([5], abs, ahead=2) as values:
        assert values.take(5) == 5
        with pytest.raises(AssertionError, match="all values were taken"):
            values.take(6)


def test_keys_that_fail_fail_the_step_and_do_not_hang_it():
    def keys():
        yield 0
        raise LookupError("no such key")

    with Prefetcher(keys(), abs, ahead=2) as values:
        assert values.take(0) == 0
        with pytest.raises(LookupError):
            values.take(1)
