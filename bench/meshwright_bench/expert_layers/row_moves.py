"""Permute and combine against a memory copy, and router and sort, on one device.

Permute and combine move as many bytes as a copy of the rows, or fewer, so the copy is the baseline. The copy and
permute write to kept memory; a second pair writes to newly allocated memory, as a layer does.

Shapes: n tokens, k experts per token, r = n · k rows, d model width.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import RunError
from meshwright.nn.experts.grouped_linear import RowMap, find_triton, sort_by_expert, sum_bags
from meshwright.nn.experts.router import Router
from meshwright.nn.experts.router_config import RouterConfig
from meshwright_bench.alternate import Timer, Work, alternate, variant_name
from meshwright_bench.benchmarks import Benchmark
from meshwright_bench.expert_layers.cases import (
    COMBINE,
    COMBINE_BAGS,
    COMBINE_INDEXED,
    COPY,
    COPY_FRESH,
    INDEX,
    PERMUTE,
    PERMUTE_FRESH,
    ROUTER,
    SORT,
    TILINGS,
    TOP_K,
    MovesTask,
)
from meshwright_bench.train.measure import timer_on

DTYPE = torch.bfloat16

Arms = dict[str, Callable[[], object]]


def measure_moves(task: MovesTask) -> None:
    """Measure and write seconds as JSON."""
    task.result.write_text(json.dumps(all_moves(task)), "utf-8")


@torch.no_grad()
def all_moves(task: MovesTask) -> dict[str, Any]:
    """Measure the seconds per round of every move, and of the steps before them.

    Raises:
        RunError: a move's result is wrong.
    """
    torch.manual_seed(0)
    device = torch.device(task.device)
    x_nd = torch.randn(task.num_tokens, task.dim, device=device).to(DTYPE)
    router = Router(task.dim, RouterConfig(task.num_experts, task.top_k)).to(device, DTYPE)
    seconds: dict[str, Any] = {}
    parts = (combine_arms,) if task.only_combine else (move_arms, routing_arms)
    for arms in (part(task, x_nd, router) for part in parts):
        for arm in arms.values():
            arm()
        seconds.update(alternate(arms, timer=move_timer(device), rounds=task.rounds, steps=task.steps).seconds)
    return {"seconds": seconds, "copy_bytes": 2 * task.num_tokens * task.top_k * task.dim * DTYPE.itemsize}


def move_timer(device: torch.device) -> Timer:
    """Return a timer of a device, on a CPU of this thread's processor time: waiting for other jobs is not counted."""
    return timer_on(device) if device.type == "cuda" else _processor_seconds


def _processor_seconds(work: Work) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def rows_of_tokens(task: MovesTask, x_nd: Tensor, router: Router) -> RowMap:
    """Return the token of each row, ordered by expert."""
    order_r, _ = sort_by_expert(router(x_nd[None]).experts_nk.flatten(), task.num_experts)
    return RowMap(order_r // task.top_k, task.num_tokens)


def combine_arms(task: MovesTask, x_nd: Tensor, router: Router) -> Arms:
    """Return a copy of the rows of all tokens, and ways to combine them.

    Raises:
        RunError: a result is wrong.
    """
    rows = rows_of_tokens(task, x_nd, router)
    source_rd, kept_rd = rows.gather(x_nd), x_nd.new_empty(len(rows.index_m), task.dim)
    check_moves(rows, x_nd)
    variants = {name: partial(run, source_rd, *rows.members) for name, run in tiled_sums(source_rd.device)}
    sums_nd = rows.sum(source_rd)
    if different := [name for name, run in variants.items() if not torch.equal(run(), sums_nd)]:
        raise RunError(
            f"{' and '.join(different)} and {COMBINE} differ",
            where=f"bench {Benchmark.EXPERTS}",
            rule="sizes of programs change no bit, else the times are meaningless",
            fix="this is a bug: please report it with this message",
        )
    return {
        COPY: lambda: kept_rd.copy_(source_rd),
        COMBINE: lambda: rows.sum(source_rd),
        COMBINE_BAGS: lambda: sum_bags(source_rd, *rows.members),
        **variants,
    }


def tiled_sums(device: torch.device) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """Yield names and sums with other sizes of programs, if the device runs Triton."""
    if device.type == "cuda" and find_triton() is not None:
        from meshwright.nn.experts.triton_row_sums import Tiling, sum_rows

        for sizes in TILINGS:
            yield variant_name(COMBINE, sizes), partial(sum_rows, tiling=Tiling(**sizes))


def move_arms(task: MovesTask, x_nd: Tensor, router: Router) -> Arms:
    """Return copies and moves of the rows of all tokens.

    Raises:
        RunError: a move's result is wrong.
    """
    rows = rows_of_tokens(task, x_nd, router)
    token_r = rows.index_m
    source_rd, kept_rd = rows.gather(x_nd), x_nd.new_empty(len(token_r), task.dim)
    check_moves(rows, x_nd)

    def permute() -> Tensor:
        return torch.index_select(x_nd, 0, rows.index_m, out=kept_rd)

    return {
        COPY: lambda: kept_rd.copy_(source_rd),
        PERMUTE: permute,
        COMBINE: lambda: rows.sum(source_rd),
        COMBINE_INDEXED: lambda: RowMap(token_r, task.num_tokens).sum(source_rd),
        COPY_FRESH: source_rd.clone,
        PERMUTE_FRESH: lambda: rows.gather(x_nd),
    }


def routing_arms(task: MovesTask, x_nd: Tensor, router: Router) -> Arms:
    """Return the steps before permute: router, top-k within it, sort by expert, and the index that combine needs."""
    scores_ne = router.gate(x_nd).softmax(-1)
    experts_r = router(x_nd[None]).experts_nk.flatten()
    order_r, _ = sort_by_expert(experts_r, task.num_experts)
    return {
        ROUTER: lambda: router(x_nd[None]),
        TOP_K: lambda: scores_ne.topk(task.top_k, -1),
        SORT: lambda: sort_by_expert(experts_r, task.num_experts),
        INDEX: lambda: RowMap(order_r // task.top_k, task.num_tokens).members,
    }


def check_moves(rows: RowMap, x_nd: Tensor) -> None:
    """Compare permute with plain indexing, and combine with a float64 sum, once and again.

    Raises:
        RunError: the results differ.
    """
    rows_rd = rows.gather(x_nd)
    sums_nd = rows.sum(rows_rd)
    exact_nd = torch.zeros_like(x_nd, dtype=torch.float64).index_add_(0, rows.index_m, rows_rd.double())
    is_right = torch.equal(rows_rd, x_nd[rows.index_m]) and torch.allclose(sums_nd.double(), exact_nd, rtol=2**-7)
    if not (is_right and torch.equal(sums_nd, rows.sum(rows_rd))):
        raise RunError(
            "permute or combine gave an incorrect result",
            where=f"bench {Benchmark.EXPERTS}",
            rule="they must equal plain indexing and a float64 sum, and repeat bitwise, else the times are meaningless",
            fix="this is a bug: please report it with this message",
        )
