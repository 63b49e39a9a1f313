"""A mixture-of-experts layer, in place of a block's feed-forward layer, and the dispatch of tokens to its experts: the
interface, and the local dispatcher, for ranks that hold all experts.

The SwiGLU experts (Shazeer 2020) are computed for all tokens sent to them at once. Rows are ordered by expert, then
source rank, then token, and there are no rows past the last expert's. Under a capacity, every expert has the same
number of rows, so that shapes do not depend on routing (for capture in a CUDA graph), and nothing is read on the host.
Slots without a token hold zeros and have the weight zero. With expert parallelism, `parallel/expert_dispatch.py`
implements the same interface, so models see no mesh.

Shapes: b batch, t time, n = b · t tokens, k experts per token, c = n · k choices, d model width, f hidden width, e
experts, s = experts · slots, r rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.nn.experts.grouped_linear import RowGroups, RowMap, grouped_linear, sort_by_expert
from meshwright.nn.experts.router import Router, Routing
from meshwright.nn.experts.router_config import RouterConfig
from meshwright.nn.kept_results import ForwardCache
from meshwright.nn.linear import WeightGradStore
from meshwright.nn.transformer_block import FeedForward


class MixtureOfExperts(nn.Module):
    """Router, experts, and optional shared experts that every token passes (DeepSeek-AI 2024).

    Shared experts compute in between: `gate` while ranks exchange the numbers of rows, `up` while rows travel to their
    experts, and `down` while they return.
    """

    runs_eagerly = True
    """The number of rows changes with every batch, so a graph would be compiled again for each."""

    def __init__(self, dim: int, config: RouterConfig, *, expert_dim: int, shared_dim: int = 0) -> None:
        super().__init__()
        self.router = Router(dim, config)
        self.experts = Experts(dim, num_experts=config.num_experts, expert_dim=expert_dim)
        self.shared = FeedForward(dim, ffn_dim=shared_dim) if shared_dim else None
        self.received = ForwardCache()
        self.dispatcher: Dispatcher = LocalDispatcher(config.num_experts)

    @property
    def switches_tasks(self) -> bool:
        """Whether another task may compute while this layer's rows travel (`comm/overlap.py`)."""
        return self.dispatcher.switches_tasks

    def forward(self, x_btd: Tensor) -> Tensor:
        """Map [b, t, d] to [b, t, d]."""
        routing = self.router(x_btd)
        dispatch = self.dispatcher.start(x_btd.flatten(0, 1), routing, self.received)
        shared = self.shared
        gated_btf = None if shared is None else F.silu(shared.gate(x_btd))
        dispatch.send()
        hidden_btf = None if shared is None else gated_btf * shared.up(x_btd)
        rows = dispatch.receive()
        dispatch.combine(rows, self.experts(rows.rows_rd, rows.groups, rows.weights_r))
        shared_btd = None if shared is None else shared.down(hidden_btf)
        out_btd = dispatch.finish().view_as(x_btd)
        return out_btd if shared_btd is None else out_btd + shared_btd


class Experts(nn.Module):
    """Experts of one layer: weight · down(silu(gate(x)) · up(x)) per row, with the matrices stacked by expert.

    The numbers of experts and columns are those of the parameters, so expert and tensor parallelism can shard both.
    """

    def __init__(self, dim: int, *, num_experts: int, expert_dim: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(num_experts, expert_dim, dim))
        self.up = nn.Parameter(torch.empty(num_experts, expert_dim, dim))
        self.down = nn.Parameter(torch.empty(num_experts, dim, expert_dim))
        self.weight_gradients: WeightGradStore | None = None

    def forward(self, rows_rd: Tensor, groups: RowGroups, weights_r: Tensor) -> Tensor:
        """Return the experts' outputs times the rows' routing weights, [r, d].

        The weights, in at least float32, are applied to the hidden layer, where they cost least.
        """
        store = self.weight_gradients
        gated_rf = F.silu(grouped_linear(rows_rd, self.gate, groups, store))
        hidden_rf = gated_rf * grouped_linear(rows_rd, self.up, groups, store)
        return grouped_linear((hidden_rf * weights_r[:, None]).to(rows_rd.dtype), self.down, groups, store)

    def deferred_parameters(self) -> Iterable[nn.Parameter]:
        """Return the matrices of all experts."""
        return [self.gate, self.up, self.down]


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
        return _LocalDispatch(x_nd, routing, self._num_experts)


class _LocalDispatch(Dispatch):
    def __init__(self, x_nd: Tensor, routing: Routing, num_experts: int) -> None:
        self._x_nd, self._routing, self._num_experts = x_nd, routing, num_experts
        self._out_nd: Tensor | None = None

    def send(self) -> None:
        """Do nothing: all rows are here."""

    def receive(self) -> ExpertRows:
        """Return the rows by expert; under a capacity, in slots."""
        routing, (num_tokens, top_k) = self._routing, self._routing.experts_nk.shape
        if routing.capacity is not None:
            slots = PaddedSlots(routing, self._num_experts)
            groups = RowGroups.even(self._num_experts, slots.slots_per_expert, self._x_nd.device)
            return ExpertRows(slots.rows(self._x_nd), groups, slots.weights(routing.weights_nk)[:, 0], slots)
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


class PaddedSlots:
    """Slots of one routing, by expert, then token: the token of each slot, and its choice of the expert.

    The routing has a capacity, which drops the choices that have no slot.
    """

    def __init__(self, routing: Routing, num_experts: int) -> None:
        assert routing.capacity is not None, "slots need a capacity"
        self.slots_per_expert = routing.num_samples * routing.capacity
        (num_tokens, top_k), experts_c = routing.experts_nk.shape, routing.experts_nk.flatten()
        num_choices, num_slots = experts_c.numel(), num_experts * self.slots_per_expert
        order_c, sizes_e = sort_by_expert(experts_c, num_experts)
        starts_e = F.pad(sizes_e.cumsum(0), (1, 0))  # the last one is that of dropped choices
        sorted_c = experts_c[order_c]
        places_c = torch.arange(num_choices, device=experts_c.device) - starts_e[sorted_c]
        has_slot_c = (sorted_c < num_experts) & (places_c < self.slots_per_expert)
        slots_c = torch.where(has_slot_c, sorted_c * self.slots_per_expert + places_c, num_slots)
        choice_s = torch.full((num_slots + 1,), num_choices, device=experts_c.device)
        choice_s = choice_s.scatter_(0, slots_c, order_c)[:num_slots]
        self._choices = RowMap(choice_s, num_choices + 1)
        self._tokens = RowMap(choice_s // top_k, num_tokens + 1)

    def rows(self, x_nd: Tensor) -> Tensor:
        """Return the row of each slot, [s, d]."""
        return self._tokens.gather(F.pad(x_nd, (0, 0, 0, 1)))

    def weights(self, weights_nk: Tensor) -> Tensor:
        """Return the routing weight of each slot, [s, 1]."""
        return self._choices.gather(F.pad(weights_nk.reshape(-1, 1), (0, 0, 0, 1)))

    def sum(self, out_sd: Tensor) -> Tensor:
        """Return the sum of each token's slots, [n, d]."""
        return self._tokens.sum(out_sd)[:-1]
