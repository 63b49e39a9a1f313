"""Expert-parallel layers on real ranks: time with and without overlap of shared experts, and reads by the host.

Shapes: b samples, t tokens, d model width.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from meshwright.comm.collective_log import group_record
from meshwright.comm.collectives import world_size
from meshwright.errors import RunError
from meshwright.mesh.process_groups import process_group
from meshwright.nn.experts.layer import Dispatch, Dispatcher, ExpertRows, Experts, MixtureOfExperts
from meshwright.nn.experts.router import Routing
from meshwright.nn.experts.router_config import RouterConfig
from meshwright.nn.kept_results import ForwardCache
from meshwright.parallel.expert_dispatch import AllToAllDispatcher
from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.alternate import alternate
from meshwright_bench.benchmarks import Benchmark
from meshwright_bench.expert_layers.cases import OVERLAPPED, WAITING, LayerTask, PairTask
from meshwright_bench.overlap_pair import measure_pair, switch_seconds
from meshwright_bench.train.measure import timer_on

CPU = torch.device("cpu")


class WaitingDispatcher(Dispatcher):
    """Dispatcher whose rows arrive before shared experts compute: the baseline without overlap."""

    def __init__(self, inner: Dispatcher) -> None:
        self._inner = inner

    def start(self, x_nd: Tensor, routing: Routing, cache: ForwardCache) -> Dispatch:
        """Send the rows, and wait for them."""
        return _WaitingDispatch(self._inner.start(x_nd, routing, cache))


class _WaitingDispatch(Dispatch):
    def __init__(self, inner: Dispatch) -> None:
        self._inner = inner
        inner.send()
        self._rows = inner.receive()
        self._out_nd: Tensor | None = None

    def send(self) -> None:
        """Do nothing: the rows are here."""

    def receive(self) -> ExpertRows:
        """Return the rows."""
        return self._rows

    def combine(self, rows: ExpertRows, out_rd: Tensor) -> None:
        """Return the outputs, and wait for this rank's."""
        self._inner.combine(rows, out_rd)
        self._out_nd = self._inner.finish()

    def finish(self) -> Tensor:
        """Return this rank's outputs."""
        assert self._out_nd is not None, "combine comes first"
        return self._out_nd


def measure_layer(context: RankContext, task: LayerTask) -> None:
    """Measure on all ranks; rank 0 writes seconds and host reads as JSON."""
    with process_group(
        rank=context.rank, num_ranks=context.num_ranks, device=CPU, timeout_s=120, store_path=context.store_path
    ):
        answer = both_orders(task)
    if context.rank == 0:
        task.result.write_text(json.dumps(answer), "utf-8")


def both_orders(task: LayerTask) -> dict[str, Any]:
    """Measure the seconds of forward and backward with both dispatchers, and count host reads. Called on all ranks.

    Raises:
        RunError: the results differ.
    """
    group = dist.group.WORLD
    assert group is not None, "a process group"
    layers = build_layers(task, world_size(group))
    dispatcher = AllToAllDispatcher(task.num_experts, group)
    dispatchers = {OVERLAPPED: dispatcher, WAITING: WaitingDispatcher(dispatcher)}
    x_btd, gradient_btd = torch.randn(2, 1, task.num_tokens, task.dim)
    arms: dict[str, Callable[[], Tensor]] = {
        name: partial(run_layers, layers, each, x_btd, gradient_btd) for name, each in dispatchers.items()
    }
    reads = _host_reads(arms[OVERLAPPED], group)
    if not torch.equal(arms[OVERLAPPED](), arms[WAITING]()):
        raise RunError(
            "a layer's result depends on when it waits for its rows",
            where=f"bench {Benchmark.EXPERTS}",
            rule="both orders must give the same result bitwise, else the comparison is meaningless",
            fix="this is a bug: please report it with this message",
        )
    timed = alternate(arms, timer=timer_on(CPU), rounds=task.rounds, steps=task.steps)
    return {"seconds": timed.seconds, "host_reads": reads, "layers": task.num_layers}


def build_layers(task: LayerTask, num_ranks: int) -> nn.Sequential:
    """Return layers with this rank's experts; everything else is the same on all ranks."""
    config = RouterConfig(task.num_experts, task.top_k)
    torch.manual_seed(0)
    layers = nn.Sequential()
    for _ in range(task.num_layers):
        layer = MixtureOfExperts(task.dim, config, expert_dim=task.expert_dim, shared_dim=task.shared_dim)
        layer.experts = Experts(task.dim, num_experts=task.num_experts // num_ranks, expert_dim=task.expert_dim)
        layers.append(layer)
    for parameter in layers.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return layers


def run_layers(layers: nn.Sequential, dispatcher: Dispatcher, x_btd: Tensor, gradient_btd: Tensor) -> Tensor:
    """Run forward and backward, and return the gradient of `x`."""
    for layer in layers:
        assert isinstance(layer, MixtureOfExperts)
        layer.dispatcher = dispatcher
    layers.zero_grad()
    x_btd = x_btd.detach().requires_grad_()
    layers(x_btd).backward(gradient_btd)
    assert x_btd.grad is not None
    return x_btd.grad


def _host_reads(run: Callable[[], object], group: ProcessGroup) -> int:
    """Return how often the host reads splits in one forward and backward."""
    before = group_record(group).split_reads
    run()
    return group_record(group).split_reads - before


def measure_pairs(task: PairTask) -> None:
    """Measure two overlapped tasks that only wait, and write seconds as JSON."""
    pair = measure_pair(rounds=task.rounds)
    answer = {"pair_s": pair.pair_s, "sum_s": pair.sum_s, "switch_s": switch_seconds()}
    task.result.write_text(json.dumps(answer), "utf-8")
