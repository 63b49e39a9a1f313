"""A mixture-of-experts layer, in place of a block's feed-forward layer.

Its SwiGLU experts (Shazeer 2020) are computed for all tokens sent to them at once.

Shapes: b batch, t time, e experts, r rows, d model width, f hidden width.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.nn.deferred_weight_gradients import WeightGradStore
from meshwright.nn.experts.dispatcher import Dispatcher, LocalDispatcher
from meshwright.nn.experts.grouped_linear import RowGroups, grouped_linear
from meshwright.nn.experts.router import Router
from meshwright.nn.experts.router_config import RouterConfig
from meshwright.nn.forward_cache import ForwardCache
from meshwright.nn.transformer_block import FeedForward


class MixtureOfExperts(nn.Module):
    """Router, experts, and optional shared experts that every token passes (DeepSeek-AI 2024).

    Shared experts compute in between: `gate` while ranks exchange the numbers of rows, `up` while rows travel to their
    experts, and `down` while they return.
    """

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

    # The number of rows changes with every batch, so a graph would be compiled again for each.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
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

        Args:
            rows_rd: rows by expert.
            groups: number of rows of each expert.
            weights_r: routing weights, at least float32; applied to the hidden layer, where they cost least.
        """
        store = self.weight_gradients
        gated_rf = F.silu(grouped_linear(rows_rd, self.gate, groups, store))
        hidden_rf = gated_rf * grouped_linear(rows_rd, self.up, groups, store)
        return grouped_linear((hidden_rf * weights_r[:, None]).to(rows_rd.dtype), self.down, groups, store)

    def deferred_parameters(self) -> Iterable[nn.Parameter]:
        """Return the matrices of all experts."""
        return [self.gate, self.up, self.down]
