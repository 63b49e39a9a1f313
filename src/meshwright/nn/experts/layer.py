"""A mixture-of-experts layer, in place of a block's feed-forward layer.

Shapes: b batch, t time, d model width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.nn.experts.dispatcher import Dispatcher, LocalDispatcher
from meshwright.nn.experts.router import Router
from meshwright.nn.experts.router_config import RouterConfig
from meshwright.nn.experts.swiglu_experts import Experts
from meshwright.nn.forward_cache import ForwardCache
from meshwright.nn.transformer_block import FeedForward


class MixtureOfExperts(nn.Module):
    """Router, experts, and optional shared experts that every token passes (DeepSeek-AI 2024).

    Shared experts compute while rows travel: their first layer during the dispatch, their second during the combine.
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
        hidden_btf = None if self.shared is None else F.silu(self.shared.gate(x_btd)) * self.shared.up(x_btd)
        dispatch.send()
        rows = dispatch.receive()
        dispatch.combine(rows, self.experts(rows.rows_rd, rows.groups, rows.weights_r))
        shared_btd = None if self.shared is None else self.shared.down(hidden_btf)
        out_btd = dispatch.finish().view_as(x_btd)
        return out_btd if shared_btd is None else out_btd + shared_btd
