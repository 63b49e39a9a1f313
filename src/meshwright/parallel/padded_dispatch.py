"""Dispatch over expert-parallel ranks in a fixed number of slots per expert: equal splits, nothing read on the host.

Under a capacity, a row travels per slot, with its weight. Shapes do not depend on routing, so the layer can be captured
in a CUDA graph.

Shapes: d model width, R ranks, e local experts, t slots per expert and rank, s = R · e · t slots sent or received.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from meshwright.comm.alltoallv import start_all_to_all
from meshwright.comm.alltoallv_async import AllToAllHandle
from meshwright.comm.collectives import world_size
from meshwright.nn.experts.dispatcher import Dispatch, ExpertRows
from meshwright.nn.experts.grouped_linear import RowGroups
from meshwright.nn.experts.padded_slots import PaddedSlots
from meshwright.nn.experts.router import Routing
from meshwright.nn.forward_cache import ForwardCache


class ReturningRows:
    """Rows on their way back to the ranks of their tokens."""

    def __init__(self, rows: Tensor, send: list[int], recv: list[int], group: ProcessGroup, *, at_once: bool) -> None:
        """Start to return rows.

        Args:
            rows: rows by destination rank.
            send: rows to each rank.
            recv: rows from each rank.
            group: group of the ranks.
            at_once: False to start with `wait`: a recomputed forward ends where the backward needs nothing more, which
                may be before the wait.
        """
        self._rows, self._send, self._recv, self._group = rows, send, recv, group
        self._handle = self._start() if at_once else None

    def _start(self) -> AllToAllHandle:
        return start_all_to_all(self._rows, send_splits=self._send, recv_splits=self._recv, group=self._group)

    def wait(self) -> Tensor:
        """Return the rows received."""
        rows: Tensor = (self._handle or self._start()).wait()
        return rows


class PaddedRankDispatch(Dispatch):
    """Dispatch in slots."""

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
