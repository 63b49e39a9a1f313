"""Copies to a device are in order whatever the streams do; each of the four waits is needed for that."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.prefetch.device_copies import (
    NUM_STAGINGS,
    Destination,
    DirectCopies,
    StreamCopies,
    open_copies,
)
from meshwright.data.prefetch.streams import CudaStreams
from tests.data.prefetch.fake_streams import FakeStreams, Order, Wait

NUM_BATCHES = 8


def batch_of(number, shape=(3,)):
    return torch.full(shape, number), torch.full(shape, 100 + number)


def consume(streams, *, reuse=False, progress=(0,) * NUM_BATCHES, ahead=2, synced=False):
    """Copy batches `ahead` of the compute stream's reads, as a prefetcher does; what the reads found, by batch.

    With `synced`, the host waits for the device after each batch, as it does for a step's loss.
    """
    copies, found, waiting = StreamCopies(streams), [], []
    slots = [Destination(torch.full((3,), -1) for _ in range(2)) for _ in range(ahead + 1)]

    def use(number, handle):
        for x in handle.wait_stream():
            streams.read_later(x, found)
        if reuse:
            slots[number % len(slots)].release(streams)

    for number, steps in enumerate(progress):
        host = batch_of(number)
        waiting.append((number, copies.start(host, slots[number % len(slots)] if reuse else None)))
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
    reuse=st.booleans(),
    ahead=st.integers(0, 4),
)
def test_each_read_finds_its_batch_in_any_order(order, seed, progress, reuse, ahead):
    streams = FakeStreams(order, seed=seed)
    assert consume(streams, reuse=reuse, progress=progress, ahead=ahead) == EXPECTED
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
    reuse = wait is Wait.COPY_FOR_CONSUMER
    found = [
        consume(FakeStreams(order, without=wait), reuse=reuse) for order in (Order.COPIES_LAST, Order.COMPUTE_LAST)
    ]
    assert any(one != EXPECTED for one in found)
    fine = [consume(FakeStreams(order), reuse=reuse) for order in (Order.COPIES_LAST, Order.COMPUTE_LAST)]
    assert fine == [EXPECTED] * 2


@pytest.mark.parametrize("wait", list(Wait))
def test_random_orders_find_a_missing_wait_too(wait):
    reuse = wait is Wait.COPY_FOR_CONSUMER
    orders = (FakeStreams(Order.RANDOM, seed=seed, without=wait) for seed in range(50))
    assert any(consume(streams, reuse=reuse) != EXPECTED for streams in orders)


def test_the_host_has_to_wait_for_itself():
    """After `wait_stream` the copy may not even have begun; after `wait_host` it is done."""
    streams = FakeStreams(Order.COPIES_LAST)
    handle = StreamCopies(streams).start(batch_of(7))
    assert [x[0].item() for x in handle.wait_stream()] == [-1, -1]
    assert [x[0].item() for x in handle.wait_host()] == [7, 107]


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


def test_a_destination_of_another_shape_is_refused():
    with pytest.raises(AssertionError, match="does not convert"):
        StreamCopies(FakeStreams(Order.RANDOM)).start(batch_of(1), Destination(batch_of(1, (4,))))


def test_a_cpu_has_no_streams_and_no_copies():
    copies, host = open_copies(torch.device("cpu")), batch_of(3)
    assert isinstance(copies, DirectCopies)
    handle = copies.start(host)
    assert all(a is b for a, b in zip(handle.wait_stream(), host, strict=True))
    assert all(a is b for a, b in zip(handle.wait_host(), host, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("reuse", [False, True])
def test_on_a_gpu_reads_find_their_batch_behind_a_delayed_copy(reuse):
    device = torch.device("cuda")
    streams = CudaStreams(device)
    copies, sums = StreamCopies(streams), []
    slot = Destination(torch.empty(1 << 22, dtype=torch.int64, device=device) for _ in range(1))
    for number in range(12):
        with torch.cuda.stream(streams._copies if number % 2 else torch.cuda.current_stream()):
            torch.cuda._sleep(20_000_000)  # the copy is late, or its reader is
        (x,) = copies.start((torch.full((1 << 22,), number),), slot if reuse else None).wait_stream()
        sums.append(x.sum())
        if reuse:
            slot.release(streams)
        del x
    assert [int(x) for x in sums] == [number << 22 for number in range(12)]
    (x,) = copies.start((torch.full((1 << 22,), 5),)).wait_host()
    assert streams._copies.query() and x.tolist()[:3] == [5, 5, 5]
