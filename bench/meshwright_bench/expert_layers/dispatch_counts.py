"""Rows and bytes of a dispatch on real ranks, and their lower bounds.

The lower bound is counted token by token from the routing alone: a row for every pair of a token and another rank that
holds some of its experts. The rows are counted by the collectives: only they depend on the width, so the bytes of
dispatches of two widths give their number.

Shapes: n tokens, k experts per token, d model width.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.collective_log import group_record
from meshwright.comm.collectives import all_gather_object, rank, world_size
from meshwright.errors import RunError
from meshwright.mesh.process_groups import process_group
from meshwright.nn.experts.router import Routing
from meshwright.nn.kept_results import ForwardCache
from meshwright.parallel.expert_dispatch import AllToAllDispatcher
from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.benchmarks import Benchmark
from meshwright_bench.expert_layers.cases import DispatchTask

CPU = torch.device("cpu")
DTYPE = torch.bfloat16


class SentBytes(NamedTuple):
    """Bytes that this rank sends to others."""

    dispatch: int
    """Numbers of rows, rows and choices."""
    combine: int


def measure_dispatch(context: RankContext, task: DispatchTask) -> None:
    """Count on all ranks; rank 0 writes the sums over ranks as JSON."""
    with process_group(
        rank=context.rank, num_ranks=context.num_ranks, device=CPU, timeout_s=120, store_path=context.store_path
    ):
        answer = count_dispatch(task)
    if context.rank == 0:
        task.result.write_text(json.dumps(answer), "utf-8")


def count_dispatch(task: DispatchTask) -> dict[str, int]:
    """Return rows, bytes and lower bounds, summed over ranks. Must be called on all ranks.

    Raises:
        RunError: the tokens did not return as they were sent.
    """
    routing = uniform_routing(task)
    narrow, wide = (sent_bytes(task, routing, dim) for dim in (task.dim // 2, task.dim))
    rank_of_nk = routing.experts_nk // (task.num_experts // world_size(None))
    row_bytes = task.dim * DTYPE.itemsize
    counts = {
        "tokens": task.num_tokens,
        "rows": (wide.dispatch - narrow.dispatch) // (row_bytes - task.dim // 2 * DTYPE.itemsize),
        "lower_bound": rows_needed(rank_of_nk.tolist(), own=rank(None)),
        "choices": int((rank_of_nk != rank(None)).sum()),
        "dispatch_bytes": wide.dispatch,
        "combine_bytes": wide.combine,
    }
    by_rank = all_gather_object(counts)
    return {name: sum(each[name] for each in by_rank) for name in counts} | {"row_bytes": row_bytes}


def rows_needed(rank_of_nk: list[list[int]], *, own: int) -> int:
    """Return how many pairs there are of a token and a rank, other than its own, that holds some of its experts."""
    return sum(len(set(ranks) - {own}) for ranks in rank_of_nk)


def uniform_routing(task: DispatchTask) -> Routing:
    """Return this rank's routing: distinct experts per token, independent and uniform, with weights that sum to 1."""
    generator = torch.Generator().manual_seed(rank(None))
    scores_ne = torch.rand(task.num_tokens, task.num_experts, generator=generator)
    top = scores_ne.topk(task.top_k)
    weights_nk = top.values / top.values.sum(1, keepdim=True)
    return Routing(top.indices, weights_nk, num_samples=1, capacity=None)


def sent_bytes(task: DispatchTask, routing: Routing, dim: int) -> SentBytes:
    """Dispatch rows of a width to experts that return them unchanged, combine them, and count the bytes.

    Raises:
        RunError: the tokens did not return as they were sent.
    """
    assert dist.group.WORLD is not None, "a process group"
    record = group_record(dist.group.WORLD)
    x_nd = torch.randn(task.num_tokens, dim, dtype=DTYPE)
    start = record.sent["all_to_all"]
    dispatch = AllToAllDispatcher(task.num_experts, dist.group.WORLD).start(x_nd, routing, ForwardCache())
    dispatch.send()
    rows = dispatch.receive()
    sent = record.sent["all_to_all"]
    dispatch.combine(rows, (rows.rows_rd * rows.weights_r[:, None]).to(DTYPE))
    _check_returned(dispatch.finish(), x_nd)
    return SentBytes(sent - start, record.sent["all_to_all"] - sent)


def _check_returned(out_nd: Tensor, x_nd: Tensor) -> None:
    if not torch.allclose(out_nd.float(), x_nd.float(), rtol=0.05, atol=0.05):
        raise RunError(
            "tokens did not return from experts that leave them unchanged",
            where=f"bench {Benchmark.EXPERTS}",
            rule="a token's weights sum to 1, so its rows sum to the token, else the counts are meaningless",
            fix="this is a bug: please report it with this message",
        )
