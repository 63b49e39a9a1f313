"""Another Python thread keeps running in waits for other ranks and in the C++ kernels: at 50 Hz at least.

What is asserted is 50 Hz where the thread ticks at 100 Hz or more beside an idle thread, as measured just before; on a
machine too busy for that, half of that rate (`ticks.Ticks.is_free`). A machine that gets busy meanwhile is measured
again (`ticks.first_free`). A held GIL leaves two ticks a call on any machine, and is measured once.

A prefetching worker, a watchdog or a server thread depends on it, and an all-to-all that held the GIL could deadlock
with another thread's. The peer of a wait arrives when it is told through a pipe: after as many ticks as the wait is to
last, so that the machine's load makes a wait longer and not the test fail. If the GIL were held, the ticks would never
come; the peer then arrives after a limit instead, and the rate shows it.
"""

from __future__ import annotations

import ctypes
import select
import socket
import threading
from collections.abc import Callable
from itertools import count

import pytest
import torch

from meshwright.comm import all_to_all
from meshwright.comm.alltoallv import SplitExchange, start_all_to_all
from meshwright.comm.collectives import (
    LARGE_SHARD_BYTES,
    all_gather_rows,
    all_reduce_sum,
    barrier,
    open_channels,
    reduce_scatter_sum,
)  # fmt: skip
from meshwright.comm.compression.catalogue import Codec
from meshwright.comm.kernels import dispatch
from meshwright.comm.kernels.dispatch import CpuKernels, Isa
from tests.comm.ticks import Ticker, Ticks, first_free, hold_the_gil, release_the_gil
from tests.helpers import quick_and_slow

NUM_TICKS, LIMIT_S = 80, 5.0
"""Ticks of a wait, and how long the peer waits for them."""
SPLITS = {"send_splits": [1, 1], "recv_splits": [1, 1]}


def rows():
    return torch.arange(2.0).view(2, 1)


def all_to_all_in_flight():
    handle = start_all_to_all(rows(), **SPLITS)
    return handle.wait()


def split_exchange():
    return SplitExchange(torch.ones(2, 1, dtype=torch.int64), None).read()


WAITS: dict[str, Callable[[], object]] = {
    "barrier": barrier,
    "all-reduce": lambda: all_reduce_sum(torch.ones(4)),
    "all-gather": lambda: all_gather_rows(rows()),
    "all-gather of large shards": lambda: all_gather_rows(torch.ones(LARGE_SHARD_BYTES)),
    "reduce-scatter": lambda: reduce_scatter_sum(rows()),
    "all-to-all": lambda: all_to_all(rows(), **SPLITS),
    "all-to-all in flight": all_to_all_in_flight,
    "exchange of splits": split_exchange,
}


def transfer(rank):
    """A send of rank 1 that rank 0 receives."""
    (channel,) = open_channels([(1, 0)], rank=rank, timeout_s=60)
    x = torch.ones(3)
    return (channel.receive(x) if rank == 0 else channel.send(x)).wait


def ticks_while_waiting(rank, world_size, name, address):
    """Rank 0 waits and counts; rank 1 comes when rank 0's thread has ticked often enough."""
    work = transfer(rank) if name == "receive" else WAITS[name]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as pipe:
        if rank == 1:
            pipe.bind(address)
        barrier()
        if rank == 1:
            select.select([pipe], [], [], LIMIT_S)
            work()
            return None
        pipe.connect(address)
        with Ticker() as ticker:

            def wait() -> None:
                telling = threading.Thread(target=tell, args=(ticker.count + NUM_TICKS,))
                telling.start()
                work()
                telling.join()

            def tell(count: int) -> None:
                ticker.wait_for(count)
                pipe.send(b"come")

            return ticker.during(wait)


QUICK = [("all-gather",), ("all-to-all in flight",), ("receive",)]


@pytest.mark.parametrize("name", quick_and_slow(zip([*WAITS, "receive"]), QUICK))
def test_a_thread_ticks_while_a_rank_waits_for_a_late_peer(gang, name, tmp_path):
    """At the required rate, and as often as the peer waited for, unless it gave up after its limit."""
    numbers = count()
    found = first_free(lambda: gang(2).run(ticks_while_waiting, name, str(tmp_path / f"pipe-{next(numbers)}"))[0])
    assert found.is_free and found.count >= NUM_TICKS - 1, found


def ticks_of(work: Callable[[], object]) -> Ticks:
    with Ticker() as ticker:
        return ticker.during(work)


def test_the_count_tells_a_held_gil_from_a_released_one():
    assert not ticks_of(lambda: hold_the_gil(0.4)).is_free
    assert first_free(lambda: ticks_of(lambda: release_the_gil(0.4))).is_free


@pytest.fixture(scope="module")
def library():
    try:
        dispatch._compiler()
    except dispatch.BuildError as error:
        pytest.skip(f"needs a C++ compiler: {error}")
    return dispatch.open_library()


NUM_ELEMENTS = 1 << 25


def ticks_of_kernel(library, name: str) -> Ticks:
    """Count during one call, with the slowest instruction set, so that the call is long."""
    compiled = CpuKernels(library, Isa.BASELINE)
    x = torch.linspace(-1, 1, NUM_ELEMENTS)
    num_bytes = {codec: codec.encoded_bytes(NUM_ELEMENTS) for codec in (Codec.INT4, Codec.INT8)}
    zeros = {codec: torch.zeros(count, dtype=torch.uint8) for codec, count in num_bytes.items()}
    payloads = zeros[Codec.INT4].repeat(4, 1)
    calls = {
        "encode": lambda: compiled.encode(x, Codec.INT4, rotate=True),
        "decode_sum": lambda: compiled.decode_sum(payloads, Codec.INT4, out=x),
        "loco_quantise": lambda: compiled.loco_quantise(x, zeros[Codec.INT8], Codec.INT4),
    }
    return ticks_of(calls[name])


@pytest.mark.parametrize(
    "name", ["encode", *(pytest.param(n, marks=pytest.mark.slow) for n in ("decode_sum", "loco_quantise"))]
)
def test_a_thread_ticks_while_a_kernel_runs(library, name):
    found = first_free(lambda: ticks_of_kernel(library, name))
    assert found.is_free, found
    held = ticks_of_kernel(ctypes.PyDLL(library._name), name)
    assert not held.is_free, held
