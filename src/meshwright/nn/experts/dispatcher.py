"""Dispatch of tokens to experts: the interface, and the local dispatcher, for ranks that hold all experts.

Rows are ordered by expert, then source rank, then token, and there are no rows past the last expert's. Under a
capacity, every expert has the same number of rows, some of them padding. With expert parallelism,
`parallel/expert_dispatch.py` implements the same interface, so models see no mesh.

Shapes: n tokens, k experts per token, d model width, e local experts, r rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meshwright.nn.experts.grouped_linear import RowGroups
from meshwright.nn.experts.padded_slots import PaddedSlots
from meshwright.nn.experts.router import Routing
from meshwright.nn.experts.row_map import RowMap, sort_by_expert
from meshwright.nn.forward_cache import ForwardCache


@dataclass(frozen=True)
class ExpertRows:
    """Rows for the local experts."""

    rows_rd: Tensor
    groups: RowGroups
    """Rows of each local expert."""
    weights_r: Tensor
    """Routing weight of each row."""
    origin: Any
    """What the dispatcher needs to combine."""


class Dispatch(ABC):
    """Dispatch in flight. `send`, `receive`, `combine` and `finish` are called once each, in this order."""

    @abstractmethod
    def send(self) -> None:
        """Start to send rows, once the number of rows of each rank is known."""

    @abstractmethod
    def receive(self) -> ExpertRows:
        """Wait for the rows for the local experts."""

    @abstractmethod
    def combine(self, rows: ExpertRows, out_rd: Tensor) -> None:
        """Start to return the experts' outputs for the received rows, which include the routing weights."""

    @abstractmethod
    def finish(self) -> Tensor:
        """Wait for this rank's outputs, and return their sum per token [n, d]."""


class Dispatcher(ABC):
    """Dispatcher of one layer. Holds no state of a forward."""

    switches_tasks = False
    """Whether it has all-to-alls in flight, which let another task compute (`comm/overlap.py`)."""

    @abstractmethod
    def start(self, x_nd: Tensor, routing: Routing, cache: ForwardCache) -> Dispatch:
        """Start a dispatch; rows received from other ranks are kept in `cache` for a recomputation."""


class LocalDispatcher(Dispatcher):
    """Dispatcher for a rank that holds all experts."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts

    def start(self, x_nd: Tensor, routing: Routing, cache: ForwardCache) -> Dispatch:
        """Return a dispatch that only permutes."""
        kind = _LocalDispatch if routing.capacity is None else _PaddedLocalDispatch
        return kind(x_nd, routing, self._num_experts)


class _LocalDispatch(Dispatch):
    def __init__(self, x_nd: Tensor, routing: Routing, num_experts: int) -> None:
        self._x_nd, self._routing, self._num_experts = x_nd, routing, num_experts
        self._out_nd: Tensor | None = None

    def send(self) -> None:
        """Do nothing: all rows are here."""

    def receive(self) -> ExpertRows:
        """Return the rows by expert."""
        routing, (num_tokens, top_k) = self._routing, self._routing.experts_nk.shape
        order_r, sizes_e = sort_by_expert(routing.experts_nk.flatten(), self._num_experts)
        groups = RowGroups(sizes_e)
        if routing.drops:
            order_r = order_r[: sum(groups.sizes)]
        tokens = RowMap(order_r // top_k, num_tokens)
        weights_r = RowMap(order_r, num_tokens * top_k).gather(routing.weights_nk.reshape(-1, 1))[:, 0]
        return ExpertRows(tokens.gather(self._x_nd), groups, weights_r, tokens)

    def combine(self, rows: ExpertRows, out_rd: Tensor) -> None:
        """Sum the outputs per token."""
        self._out_nd = rows.origin.sum(out_rd)

    def finish(self) -> Tensor:
        """Return the sums."""
        assert self._out_nd is not None, "combine comes first"
        return self._out_nd


class _PaddedLocalDispatch(_LocalDispatch):
    def receive(self) -> ExpertRows:
        """Return the rows in slots by expert."""
        slots = PaddedSlots(self._routing, self._num_experts)
        groups = RowGroups.even(self._num_experts, slots.slots_per_expert, self._x_nd.device)
        weights_r = slots.weights(self._routing.weights_nk)[:, 0]
        return ExpertRows(slots.rows(self._x_nd), groups, weights_r, slots)
