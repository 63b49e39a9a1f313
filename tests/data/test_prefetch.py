"""Prefetching: values in order and no more than allowed; copies are right on streams that run in any order."""

from __future__ import annotations

import threading
import traceback

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data import prefetch as module
from meshwright.data.prefetch import (
    NUM_STAGINGS,
    CudaStreams,
    DirectCopies,
    Prefetcher,
    StreamCopies,
    open_copies,
)
from meshwright.errors import DataError
from tests.data.fake_streams import FakeStreams, Order, Wait


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


NUM_BATCHES = 8


def batch_of(number, shape=(3,)):
    return torch.full(shape, number), torch.full(shape, 100 + number)


def consume(streams, *, progress=(0,) * NUM_BATCHES, ahead=2, synced=False):
    """Copy batches `ahead` of the compute stream's reads, as a prefetcher does; what the reads found, by batch.

    With `synced`, the host waits for the device after each batch, as it does for a step's loss.
    """
    copies, found, waiting = StreamCopies(streams), [], []

    def use(number, handle):
        for x in handle.wait_stream():
            streams.read_later(x, found)

    for number, steps in enumerate(progress):
        host = batch_of(number)
        waiting.append((number, copies.start(host)))
        for x in host:
            x.fill_(-2)  # `start` has returned: the host may write its tensors
        streams.progress(steps)
        if len(waiting) > ahead:
            use(*waiting.pop(0))
            if synced:
                streams.finish()
    while waiting:
        use(*waiting.pop(0))
    streams.finish()
    return [tuple(int(x[0]) for x in pair) for pair in zip(found[::2], found[1::2], strict=True)]


EXPECTED = [(number, 100 + number) for number in range(NUM_BATCHES)]


@given(
    order=st.sampled_from(Order),
    seed=st.integers(0, 2**31),
    progress=st.lists(st.integers(0, 12), min_size=NUM_BATCHES, max_size=NUM_BATCHES),
    ahead=st.integers(0, 4),
)
def test_each_read_finds_its_batch_in_any_order(order, seed, progress, ahead):
    streams = FakeStreams(order, seed=seed)
    assert consume(streams, progress=progress, ahead=ahead) == EXPECTED
    assert streams.num_pinned <= NUM_STAGINGS * 2


@given(
    order=st.sampled_from(Order),
    seed=st.integers(0, 2**31),
    progress=st.lists(st.integers(0, 12), min_size=NUM_BATCHES, max_size=NUM_BATCHES),
    ahead=st.integers(0, 4),
)
def test_device_memory_is_that_of_the_batches_ahead_and_in_use(order, seed, progress, ahead):
    streams = FakeStreams(order, seed=seed)
    assert consume(streams, progress=progress, ahead=ahead, synced=True) == EXPECTED
    assert streams.num_blocks <= 2 * (ahead + 1), "two tensors a batch"
    assert streams.num_pinned <= NUM_STAGINGS * 2


def test_batches_that_are_kept_would_show_as_memory():
    streams = FakeStreams(Order.COMPUTE_LAST)
    copies, kept = StreamCopies(streams), []
    for number in range(NUM_BATCHES):
        kept.append(copies.start(batch_of(number)).wait_stream())
        streams.finish()
    assert streams.num_blocks == 2 * NUM_BATCHES


@pytest.mark.parametrize("wait", list(Wait))
def test_each_wait_is_needed(wait):
    """Left out, a read finds another batch, or none, in one of the two extreme orders."""
    found = [consume(FakeStreams(order, without=wait)) for order in (Order.COPIES_LAST, Order.COMPUTE_LAST)]
    assert any(one != EXPECTED for one in found)
    fine = [consume(FakeStreams(order)) for order in (Order.COPIES_LAST, Order.COMPUTE_LAST)]
    assert fine == [EXPECTED] * 2


@pytest.mark.parametrize("wait", list(Wait))
def test_random_orders_find_a_missing_wait_too(wait):
    orders = (FakeStreams(Order.RANDOM, seed=seed, without=wait) for seed in range(50))
    assert any(consume(streams) != EXPECTED for streams in orders)


def test_batches_of_many_shapes_keep_few_pinned_tensors():
    streams, found = FakeStreams(Order.RANDOM), []
    copies = StreamCopies(streams)
    for number in range(20):
        for x in copies.start(batch_of(number, (number % 5,))).wait_stream():
            streams.read_later(x, found)
    streams.finish()
    assert [x.shape[0] for x in found[::2]] == [number % 5 for number in range(20)]
    assert all((x == i // 2 + 100 * (i % 2)).all() for i, x in enumerate(found))
    assert len(copies._stagings) == NUM_STAGINGS


def test_a_cpu_has_no_streams_and_no_copies():
    copies, host = open_copies(torch.device("cpu")), batch_of(3)
    assert isinstance(copies, DirectCopies)
    handle = copies.start(host)
    assert all(a is b for a, b in zip(handle.wait_stream(), host, strict=True))


@pytest.mark.gpu
def test_on_a_gpu_reads_find_their_batch_behind_a_delayed_copy():
    device = torch.device("cuda")
    streams = CudaStreams(device)
    copies, sums = StreamCopies(streams), []
    for number in range(12):
        with torch.cuda.stream(streams._copies if number % 2 else torch.cuda.current_stream()):
            torch.cuda._sleep(20_000_000)  # the copy is late, or its reader is
        (x,) = copies.start((torch.full((1 << 22,), number),)).wait_stream()
        sums.append(x.sum())
        del x
    assert [int(x) for x in sums] == [number << 22 for number in range(12)]
