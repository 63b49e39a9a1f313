"""Compressed collectives and FSDP2's own on real ranks: their results are compared, their bytes counted, both timed.

FSDP2's default reduce-scatter and all-gather are one call of `torch.distributed` each, with the tensors that a custom
one is given; so that call is the built-in side.
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
from meshwright_bench.comm.cases import ALL_GATHER, BUILTIN, DTYPES, ERROR_AT_MOST, REDUCE_SCATTER, WAYS, WireTask
from meshwright_bench.train.measure import timer_on

CPU = torch.device("cpu")
MEAN = dist.ReduceOp.AVG
"""What FSDP2 asks for with float32 and bfloat16 gradients."""


@dataclass(frozen=True)
class Side:
    """One way of a collective, with its own output."""

    run: Callable[[], object]
    out: Tensor
    comm: CompressedReduceScatter | CompressedAllGather | None = None
    """None of what FSDP2 calls by itself."""


def measure_wire(context: RankContext, task: WireTask) -> None:
    """Measure both collectives; rank 0 writes bytes and seconds as JSON."""
    with process_group(
        rank=context.rank, num_ranks=context.num_ranks, device=CPU, timeout_s=120, store_path=context.store_path
    ):
        found = all_collectives(task)
    if context.rank == 0:
        task.result.write_text(json.dumps(found), "utf-8")


def all_collectives(task: WireTask) -> dict[str, dict[str, dict[str, Any]]]:
    """What was measured, by collective and type of elements. All ranks call it together.

    Raises:
        RunError: a compressed result is far from the built-in's, or the count of bytes is wrong.
    """
    makers = {REDUCE_SCATTER: reduce_scatters, ALL_GATHER: all_gathers}
    return {
        collective: {dtype: _measured(collective, make(task.num_elements, getattr(torch, dtype)), task)
                     for dtype in DTYPES}
        for collective, make in makers.items()
    }  # fmt: skip


def reduce_scatters(num_elements: int, dtype: torch.dtype) -> dict[str, Side]:
    """The built-in and the compressed reduce-scatters of one gradient."""
    group = dist.group.WORLD
    assert group is not None, "the process group exists"
    num_ranks = group.size()
    x, out = _random(num_elements, dtype), torch.empty(num_elements // num_ranks, dtype=dtype)
    sides = {BUILTIN: Side(lambda: collectives.REDUCE_SCATTER(out, x, op=MEAN, group=group), out)}
    for name in WAYS[REDUCE_SCATTER]:
        method = find_method(name, Use.GRADIENTS)
        comm = CompressedReduceScatter(name, method.codec, rotate=method.rotate, feedback=method.feedback)
        sides[name] = _reduce_scatter(comm, x, torch.empty_like(out))
    return sides


def all_gathers(num_elements: int, dtype: torch.dtype) -> dict[str, Side]:
    """The built-in and the compressed all-gathers of one weight."""
    group = dist.group.WORLD
    assert group is not None, "the process group exists"
    x, out = _random(num_elements // group.size(), dtype), torch.empty(num_elements, dtype=dtype)
    sides = {BUILTIN: Side(lambda: collectives.ALL_GATHER(out, x, group=group), out)}
    for name in WAYS[ALL_GATHER]:
        method = find_method(name, Use.WEIGHTS)
        comm = CompressedAllGather(name, method.codec, rotate=method.rotate)
        sides[name] = _all_gather(comm, x, torch.empty_like(out))
    return sides


def _reduce_scatter(comm: CompressedReduceScatter, x: Tensor, out: Tensor) -> Side:
    """One step of training a call: the error is committed too."""
    group = dist.group.WORLD
    assert group is not None

    def run() -> None:
        comm(out, x, group, MEAN)  # type: ignore[arg-type]
        comm.commit()

    return Side(run, out, comm)


def _all_gather(comm: CompressedAllGather, x: Tensor, out: Tensor) -> Side:
    group = dist.group.WORLD
    assert group is not None
    return Side(lambda: comm(out, x, group), out, comm)


def _measured(collective: str, sides: dict[str, Side], task: WireTask) -> dict[str, Any]:
    """Bytes that a rank sends, and seconds by round, of each side."""
    sent = {name: _checked_bytes(collective, name, side) for name, side in sides.items()}
    for name in WAYS[collective]:
        _check_result(f"{collective} in {name}", sides[name], sides[BUILTIN], ERROR_AT_MOST[name])
    timed = alternate(
        {name: side.run for name, side in sides.items()}, timer=timer_on(CPU), rounds=task.rounds, steps=task.steps
    )
    num_ranks = world_size()
    elements_sent = task.num_elements * (num_ranks - 1) // num_ranks
    return {"bytes": sent, "seconds": timed.seconds, "elements_sent": elements_sent}


def _checked_bytes(collective: str, name: str, side: Side) -> int:
    """What this rank sends to others in one call: by the tensors that c10d is given, and by our own count alike."""
    handed = SentBytes()
    with handed:
        side.run()
    num_ranks = world_size()
    ((_, num_bytes),) = handed.calls  # one collective, which is given output and input
    sent = num_bytes * (num_ranks - 1)
    if collective == REDUCE_SCATTER:  # Its input has a piece for this rank itself.
        sent //= num_ranks
    if side.comm is not None and side.comm.sent.payload != sent:
        raise RunError(
            f"{collective} in {name} sends {sent} bytes and counts {side.comm.sent.payload}",
            where="bench comm",
            rule="what is counted is the size of the tensors that a collective is given, less a rank's own part",
            fix="none from outside: it is a bug; please report it with this message",
        )
    return sent


def _check_result(what: str, side: Side, builtin: Side, at_most: float) -> None:
    """See that a compressed result is the built-in's, as far as the codec goes."""
    expected = builtin.out.float()
    errors = all_gather_object(float((side.out.float() - expected).norm() / expected.norm()))
    if not all(error <= at_most for error in errors):
        raise RunError(
            f"{what} is off the built-in's result by {max(errors):.2g} of it",
            where="bench comm",
            rule=f"the two agree to {at_most:g}: figures of different work mean nothing",
            fix="none from outside: it is a bug; please report it with this message",
        )


def _random(num_elements: int, dtype: torch.dtype) -> Tensor:
    """Gaussian, other ones on each rank."""
    generator = torch.Generator().manual_seed(rank())
    return torch.randn(num_elements, generator=generator).to(dtype)
