"""Experts sharded over ranks, and the dispatch of tokens to them.

A token travels once to each rank that holds some of its experts, not once per expert. Its weights travel beside it, and
the rank returns one row: the weighted sum over its experts. The number of rows per rank is exchanged first, and reaches
the host with one read per layer. A rank without rows takes part in every collective all the same. Under a capacity
(`PaddedRankDispatch`) a row travels per slot instead, with its weight: equal splits that don't depend on routing,
nothing read on the host, and a layer that can be captured in a CUDA graph.

Shapes: n tokens, k experts per token, d model width, R ranks, e experts per rank; c = n · k choices, s rows sent,
a choices sent, m rows received, b choices received, r rows for the local experts.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from meshwright.comm.alltoallv import AllToAllHandle, SplitExchange, start_all_to_all
from meshwright.comm.collectives import all_reduce_sum, world_size
from meshwright.nn.experts.grouped_linear import RowGroups, RowMap, sort_by_expert
from meshwright.nn.experts.layer import Dispatch, Dispatcher, ExpertRows, PaddedSlots
from meshwright.nn.experts.router import BatchCounts, Routing
from meshwright.nn.kept_results import ForwardCache
from meshwright.parallel.local_shards import compute_on_local_shards, shard_parameter
from meshwright.parallel.private import joined_mesh
from meshwright.plan.run_plan import Atoms, ExpertLayer, LayerSpec, RunPlan, Stage


class AllToAllDispatcher(Dispatcher):
    """Dispatcher for experts sharded over a process group, consecutive experts on each rank."""

    switches_tasks = True

    def __init__(self, num_experts: int, group: ProcessGroup) -> None:
        self.num_experts, self.group = num_experts, group

    def start(self, x_nd: Tensor, routing: Routing, cache: ForwardCache) -> Dispatch:
        """Start to exchange the numbers of rows, which are known under a capacity."""
        if routing.capacity is not None:
            return PaddedRankDispatch(x_nd, routing, cache, self.num_experts, self.group)
        return _RankDispatch(x_nd, routing, cache, self.num_experts, self.group)


class _RankDispatch(Dispatch):
    def __init__(
        self, x_nd: Tensor, routing: Routing, cache: ForwardCache, num_experts: int, group: ProcessGroup
    ) -> None:
        self._x_nd, self._routing, self._cache, self._group = x_nd, routing, cache, group
        self._returning: ReturningRows | None = None
        self._tokens: RowMap | None = None
        self._packing: _Packing | None = None
        if cache.source is None:
            with cache.skipped():
                self._packing = _Packing(routing, num_experts, group)

    def send(self) -> None:
        """Read the numbers of rows, and start to send rows, and the choices that they are for."""
        if self._packing is not None:
            with self._cache.skipped():
                self._packing.send(self._x_nd, self._routing)

    def receive(self) -> ExpertRows:
        """Wait for rows and choices, and order them by expert."""
        got = _Received(*self._cache.recall(self._received))
        rows = RowMap(got.index_r, got.rows_md.shape[0])
        self._tokens = RowMap(got.token_s, self._x_nd.shape[0])
        return ExpertRows(
            rows.gather(got.rows_md), RowGroups(got.sizes_e, got.sizes), got.weights_r, (rows, got.sent, got.received)
        )

    def _received(self) -> _Received:
        assert self._packing is not None, "a recomputed forward recalls what the first one received"
        return self._packing.receive()

    def combine(self, rows: ExpertRows, out_rd: Tensor) -> None:
        """Sum the outputs per received row, and start to return the sums."""
        by_row, sent, received = rows.origin
        recomputes = self._packing is None
        self._returning = ReturningRows(by_row.sum(out_rd), received, sent, self._group, at_once=not recomputes)

    def finish(self) -> Tensor:
        """Wait for the rows of this rank's tokens, and sum them in order of the ranks that return them."""
        assert self._returning is not None and self._tokens is not None, "combine comes first"
        return self._tokens.sum(self._returning.wait())


class _Received(NamedTuple):
    """What a dispatch received, and what combining needs."""

    rows_md: Tensor
    weights_r: Tensor
    """Routing weight of each row for the experts."""
    index_r: Tensor
    """Received row of each row for the experts."""
    token_s: Tensor
    """Token of each row sent."""
    sent: list[int]
    """Rows sent to each rank."""
    received: list[int]
    """Rows received from each rank."""
    sizes: list[int]
    """Rows of each local expert."""
    sizes_e: Tensor


class _Packing:
    """Rows and choices of one dispatch: which token goes to which rank, and for which of its experts."""

    def __init__(self, routing: Routing, num_experts: int, group: ProcessGroup) -> None:
        self._group, num_ranks = group, world_size(group)
        num_tokens, top_k = routing.experts_nk.shape
        self._num_local = num_experts // num_ranks
        experts_c = routing.experts_nk.flatten()
        self._order_c, sizes = sort_by_expert(experts_c, num_experts)
        rank_c = experts_c // self._num_local  # num_ranks for a dropped choice
        token_c = torch.arange(experts_c.numel(), device=experts_c.device) // top_k
        keys_c, order_c = (rank_c * num_tokens + token_c).sort(stable=True)
        is_first_c = torch.ones_like(keys_c, dtype=torch.bool)
        is_first_c[1:] = keys_c[1:] != keys_c[:-1]
        row_c = is_first_c.cumsum(0) - 1
        rows_R = torch.zeros(num_ranks + 1, dtype=torch.int64, device=keys_c.device)
        rows_R.scatter_add_(0, keys_c // num_tokens, is_first_c.to(torch.int64))
        starts_R = rows_R.cumsum(0) - rows_R
        # A row's choices write the same token, so their order doesn't matter.
        self._token_s = torch.empty_like(keys_c).scatter_(0, row_c, keys_c % num_tokens)
        self._offset_c = torch.empty_like(row_c).scatter_(0, order_c, row_c) - starts_R[rank_c]
        counts = torch.cat((sizes.view(num_ranks, self._num_local), rows_R[:num_ranks, None]), 1)
        self._exchange = SplitExchange(counts, group)

    def send(self, x_nd: Tensor, routing: Routing) -> None:
        """Start to send rows and choices."""
        sent, received = self._exchange.read()
        self._sent, self._received = ([row[-1] for row in counts] for counts in (sent, received))
        self._received_counts, self._sizes_by_rank = self._exchange.received(), [row[:-1] for row in received]
        num_choices = [sum(row[:-1]) for row in sent]
        self._token_s = self._token_s[: sum(self._sent)]
        rows_sd = RowMap(self._token_s, x_nd.shape[0]).gather(x_nd)
        self._rows = start_all_to_all(rows_sd, send_splits=self._sent, recv_splits=self._received, group=self._group)
        chosen_a = self._order_c[: sum(num_choices)]
        weights_a1 = RowMap(chosen_a, self._order_c.numel()).gather(routing.weights_nk.reshape(-1, 1))
        # The offset of a choice's row among the rows for its rank is exact in float32 up to 2^24 tokens.
        choices_a2 = torch.cat((weights_a1, self._offset_c[chosen_a, None].to(weights_a1.dtype)), 1)
        self._choices = start_all_to_all(
            choices_a2,
            send_splits=num_choices,
            recv_splits=[sum(row) for row in self._sizes_by_rank],
            group=self._group,
        )

    def receive(self) -> _Received:
        """Wait for rows and choices, and order the choices by expert."""
        rows_md, choices_b2 = self._rows.wait(), self._choices.wait()
        sizes_Re, rows_R = self._received_counts[:, :-1], self._received_counts[:, -1]
        num_choices = choices_b2.shape[0]
        start_b = (rows_R.cumsum(0) - rows_R).repeat_interleave(sizes_Re.sum(1), output_size=num_choices)
        experts = torch.arange(self._num_local, device=rows_md.device).repeat(len(self._received))
        expert_b = experts.repeat_interleave(sizes_Re.flatten(), output_size=num_choices)
        order_r = expert_b.argsort(stable=True)
        index_r = (start_b + choices_b2.detach()[:, 1].long())[order_r]
        weights_r = RowMap(order_r, num_choices).gather(choices_b2[:, :1])[:, 0]
        sizes_e = sizes_Re.sum(0)
        sizes = [sum(column) for column in zip(*self._sizes_by_rank, strict=True)]
        return _Received(rows_md, weights_r, index_r, self._token_s, self._sent, self._received, sizes, sizes_e)


class ReturningRows:
    """Rows on their way back to the ranks of their tokens."""

    def __init__(self, rows: Tensor, send: list[int], recv: list[int], group: ProcessGroup, *, at_once: bool) -> None:
        """Return rows, in order of their ranks: at once, or only with `wait`, as a recomputed forward ends where the
        backward needs nothing more, which may be before the wait."""
        self._start = partial(start_all_to_all, rows, send_splits=send, recv_splits=recv, group=group)
        self._handle = self._start() if at_once else None

    def wait(self) -> Tensor:
        """Return the rows received."""
        rows: Tensor = (self._handle or self._start()).wait()
        return rows


class PaddedRankDispatch(Dispatch):
    """Dispatch in slots: t per expert and rank, so s = R · e · t are sent and as many received."""

    def __init__(
        self, x_nd: Tensor, routing: Routing, cache: ForwardCache, num_experts: int, group: ProcessGroup
    ) -> None:
        self._cache, self._group, self._recomputes = cache, group, cache.source is not None
        self._num_ranks, self._num_experts = world_size(group), num_experts
        self._slots = PaddedSlots(routing, num_experts)
        self._splits = [self._slots.slots_per_expert * num_experts // self._num_ranks] * self._num_ranks
        self._x_nd, self._routing = x_nd, routing
        self._in_flight: list[AllToAllHandle] = []
        self._returning: ReturningRows | None = None

    def send(self) -> None:
        """Start to send the slots' rows and weights."""
        if self._recomputes:
            return
        with self._cache.skipped():
            slots = (self._slots.rows(self._x_nd), self._slots.weights(self._routing.weights_nk))
            self._in_flight = [
                start_all_to_all(rows, send_splits=self._splits, recv_splits=self._splits, group=self._group)
                for rows in slots
            ]

    def receive(self) -> ExpertRows:
        """Wait for the slots of the local experts, and order them by expert."""
        rows_sd, weights_s1 = self._cache.recall(lambda: tuple(handle.wait() for handle in self._in_flight))
        num_local, slots = self._num_experts // self._num_ranks, self._slots.slots_per_expert
        groups = RowGroups.even(num_local, self._num_ranks * slots, rows_sd.device)
        rows_rd, weights_r1 = self._swap(rows_sd, self._num_ranks), self._swap(weights_s1, self._num_ranks)
        return ExpertRows(rows_rd, groups, weights_r1[:, 0], None)

    def _swap(self, rows_sd: Tensor, outer: int) -> Tensor:
        """Reorder slots by rank and expert to slots by expert and rank, or back."""
        by_both = rows_sd.view(outer, self._num_experts // outer, self._slots.slots_per_expert, rows_sd.shape[1])
        return by_both.transpose(0, 1).reshape(rows_sd.shape)

    def combine(self, rows: ExpertRows, out_rd: Tensor) -> None:
        """Start to return the slots' outputs."""
        by_rank = self._swap(out_rd, self._num_experts // self._num_ranks)
        splits = self._splits
        self._returning = ReturningRows(by_rank, splits, splits, self._group, at_once=not self._recomputes)

    def finish(self) -> Tensor:
        """Wait for the slots of this rank's tokens, and sum them."""
        assert self._returning is not None, "combine comes first"
        return self._slots.sum(self._returning.wait())


def apply_experts(module: nn.Module, mesh: DeviceMesh, plan: RunPlan, stage: Stage) -> None:
    """Shard the experts of a stage's module, on the meta device, and let its layers dispatch tokens, in place."""
    for kind, layer in plan.held(stage):
        experts = kind.experts
        if experts is None:
            continue
        if experts.axes:
            _shard_layer(module.get_submodule(kind.full_name("", layer)), mesh, plan, kind, experts)
        for inner in module.get_submodule(kind.full_name(experts.module, layer)).modules():
            if isinstance(inner, BatchCounts) and experts.counted:
                inner.reduce = SumOver(mesh, experts.counted)


def _shard_layer(block: nn.Module, mesh: DeviceMesh, plan: RunPlan, kind: LayerSpec, layer: ExpertLayer) -> None:
    dims = [axes for axes in (layer.axes, plan.mesh.view("tp")) if axes]
    expert_mesh = joined_mesh(mesh, dims)
    module = block.get_submodule(layer.experts)
    for parameter in kind.parameters:
        owner, _, name = parameter.name.rpartition(".")
        if owner == layer.experts:
            by_axes = {shard.axes: Shard(shard.dim) for shard in parameter.used}
            shard_parameter(module, name, expert_mesh, [by_axes.get(axes, Replicate()) for axes in dims])
    compute_on_local_shards(module)
    group = expert_mesh.get_group(0)
    setattr(block.get_submodule(layer.module), "dispatcher", AllToAllDispatcher(layer.num_experts, group))  # noqa: B010


class SumOver:
    """Sum of counts over the ranks along some axes."""

    def __init__(self, mesh: DeviceMesh, axes: Atoms) -> None:
        self._groups = [mesh.get_group(axis) for axis in axes]

    def __call__(self, counts: Tensor) -> Tensor:
        total = counts.clone()
        for group in self._groups:
            all_reduce_sum(total, group=group)
        return total
