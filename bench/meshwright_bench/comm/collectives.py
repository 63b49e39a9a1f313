"""Compare compressed collectives with FSDP2's own on real ranks: results, bytes and time.

FSDP2's default reduce-scatter and all-gather are one `torch.distributed` call each, on the same tensors that custom
collectives receive. This call is the built-in side.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm import collectives
from meshwright.comm.collectives import all_gather_object, rank, world_size
from meshwright.comm.compression.catalogue import Use, find_method
from meshwright.comm.compression.fsdp_collectives import CompressedAllGather, CompressedReduceScatter
from meshwright.errors import RunError
from meshwright.mesh.process_groups import process_group
from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.alternate import alternate
from meshwright_bench.byte_counters import SentBytes
from meshwright_bench.comm.cases import (
    ALL_GATHER,
    BUILTIN,
    COMPRESSED_SIDES,
    DTYPES,
    ERROR_AT_MOST,
    REDUCE_SCATTER,
    WireTask,
)
from meshwright_bench.train.measure import timer_on

CPU = torch.device("cpu")
MEAN = dist.ReduceOp.AVG
"""Reduction that FSDP2 uses for float32 and bfloat16 gradients."""


@dataclass(frozen=True)
class CollectiveSide:
    """One implementation of a collective, with its output."""

    run: Callable[[], object]
    out: Tensor
    comm: CompressedReduceScatter | CompressedAllGather | None = None
    """Compressed collective; None for FSDP2's default call."""


def measure_wire(context: RankContext, task: WireTask) -> None:
    """Measure both collectives; rank 0 writes bytes and seconds as JSON."""
    with process_group(
        rank=context.rank, num_ranks=context.num_ranks, device=CPU, timeout_s=120, store_path=context.store_path
    ):
        answer = all_collectives(task)
    if context.rank == 0:
        task.result.write_text(json.dumps(answer), "utf-8")


def all_collectives(task: WireTask) -> dict[str, dict[str, dict[str, Any]]]:
    """Measure both collectives with every dtype. Must be called on all ranks.

    Raises:
        RunError: a compressed result is far from the built-in one, or the byte count is incorrect.
    """
    makers = {REDUCE_SCATTER: reduce_scatters, ALL_GATHER: all_gathers}
    return {
        collective: {dtype: _measure(collective, make(task.num_elements, getattr(torch, dtype)), task)
                     for dtype in DTYPES}
        for collective, make in makers.items()
    }  # fmt: skip


def reduce_scatters(num_elements: int, dtype: torch.dtype) -> dict[str, CollectiveSide]:
    """Return the built-in and the compressed reduce-scatters of a gradient."""
    group = dist.group.WORLD
    assert group is not None, "the process group exists"
    num_ranks = group.size()
    x, out = _random(num_elements, dtype), torch.empty(num_elements // num_ranks, dtype=dtype)
    sides = {BUILTIN: CollectiveSide(lambda: collectives.REDUCE_SCATTER(out, x, op=MEAN, group=group), out)}
    for name in COMPRESSED_SIDES[REDUCE_SCATTER]:
        comm = CompressedReduceScatter(name, find_method(name, Use.GRADIENTS))
        sides[name] = _reduce_scatter(comm, x, torch.empty_like(out))
    return sides


def all_gathers(num_elements: int, dtype: torch.dtype) -> dict[str, CollectiveSide]:
    """Return the built-in and the compressed all-gathers of a weight."""
    group = dist.group.WORLD
    assert group is not None, "the process group exists"
    x, out = _random(num_elements // group.size(), dtype), torch.empty(num_elements, dtype=dtype)
    sides = {BUILTIN: CollectiveSide(lambda: collectives.ALL_GATHER(out, x, group=group), out)}
    for name in COMPRESSED_SIDES[ALL_GATHER]:
        comm = CompressedAllGather(name, find_method(name, Use.WEIGHTS))
        sides[name] = _all_gather(comm, x, torch.empty_like(out))
    return sides


def _reduce_scatter(comm: CompressedReduceScatter, x: Tensor, out: Tensor) -> CollectiveSide:
    """Return a compressed reduce-scatter that also commits the error, like a training step."""
    group = dist.group.WORLD
    assert group is not None

    def run() -> None:
        comm(out, x, group, MEAN)  # type: ignore[arg-type]
        comm.commit()

    return CollectiveSide(run, out, comm)


def _all_gather(comm: CompressedAllGather, x: Tensor, out: Tensor) -> CollectiveSide:
    group = dist.group.WORLD
    assert group is not None
    return CollectiveSide(lambda: comm(out, x, group), out, comm)


def _measure(collective: str, sides: dict[str, CollectiveSide], task: WireTask) -> dict[str, Any]:
    """Measure the bytes sent per rank and the seconds per round of each side."""
    sent = {name: _checked_bytes(collective, name, side) for name, side in sides.items()}
    for name in COMPRESSED_SIDES[collective]:
        _check_result(f"{collective} in {name}", sides[name], sides[BUILTIN], ERROR_AT_MOST[name])
    timed = alternate(
        {name: side.run for name, side in sides.items()}, timer=timer_on(CPU), rounds=task.rounds, steps=task.steps
    )
    num_ranks = world_size()
    elements_sent = task.num_elements * (num_ranks - 1) // num_ranks
    return {"bytes": sent, "seconds": timed.seconds, "elements_sent": elements_sent}


def _checked_bytes(collective: str, name: str, side: CollectiveSide) -> int:
    """Return the bytes this rank sends in one call, after checking our own count against the c10d tensors."""
    counter = SentBytes()
    with counter:
        side.run()
    num_ranks = world_size()
    ((_, num_bytes),) = counter.calls  # one collective, with output and input
    sent = num_bytes * (num_ranks - 1)
    if collective == REDUCE_SCATTER:  # The input includes this rank's own shard.
        sent //= num_ranks
    if side.comm is not None and side.comm.sent.payload != sent:
        raise RunError(
            f"{collective} in {name} sends {sent} bytes and counts {side.comm.sent.payload}",
            where="bench comm",
            rule="the count must equal the size of the tensors passed to the collective, minus the rank's own share",
            fix="this is a bug: please report it with this message",
        )
    return sent


def _check_result(what: str, side: CollectiveSide, builtin: CollectiveSide, at_most: float) -> None:
    """Raise if a compressed result differs from the built-in one by more than the codec allows."""
    expected = builtin.out.float()
    errors = all_gather_object(float((side.out.float() - expected).norm() / expected.norm()))
    if not all(error <= at_most for error in errors):
        raise RunError(
            f"{what} differs from the built-in result by a relative error of {max(errors):.2g}",
            where="bench comm",
            rule=f"the relative error must be at most {at_most:g}, else the comparison is meaningless",
            fix="this is a bug: please report it with this message",
        )


def _random(num_elements: int, dtype: torch.dtype) -> Tensor:
    """Return a Gaussian tensor that differs between ranks."""
    generator = torch.Generator().manual_seed(rank())
    return torch.randn(num_elements, generator=generator).to(dtype)
