"""Copies to a device are in order whatever the streams do; each of the three waits is needed for that."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.prefetch import (
    NUM_STAGINGS,
    CudaStreams,
    DirectCopies,
    StreamCopies,
    open_copies,
)
from tests.data.prefetch.fake_streams import FakeStreams, Order, Wait

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
