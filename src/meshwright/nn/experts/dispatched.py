"""Expert parallelism of modules that have a function of their own for all experts, as those of transformers: tokens
travel to the ranks that hold their experts, where the function computes them, one row for each of a token's experts.

Such a module takes tokens, the experts of each and their routing weights, its parameters are stacked by expert, and its
attribute `num_experts` is their number.

Shapes: n tokens, k experts per token, d model width, r rows for the local experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.nn.experts.grouped_linear import count
from meshwright.nn.experts.layer import Dispatcher, ExpertRows
from meshwright.nn.experts.router import Routing
from meshwright.nn.kept_results import ForwardCache
from meshwright.nn.step_handles import LoadCounter
from meshwright.nn.zero_gradients import depending_on


class CalledLoad(LoadCounter):
    """Load of experts, which a call counts, given the experts of each token; their number stands for none."""

    runs_eagerly = True

    def forward(self, experts_nk: Tensor) -> None:
        """Add this micro-batch's counts."""
        self.add(count(experts_nk.flatten(), len(self.value) + 1)[:-1])


def count_tokens(module: nn.Module, num_experts: int) -> None:
    """Let a module of experts count the tokens of each in its attribute `load`, which checkpoints don't include."""
    module.load = CalledLoad(num_experts, saved=False)
    module.register_forward_pre_hook(lambda module, inputs: module.load(inputs[1]))


def dispatch_tokens(module: nn.Module) -> None:
    """Let a module of experts dispatch its tokens, in place, as soon as its `dispatcher` is set."""
    module.__class__ = type(type(module).__name__, (_Dispatched, type(module)), {})
    module.received = ForwardCache()


class _Dispatched(nn.Module):
    dispatcher: Dispatcher | None = None
    received: ForwardCache
    runs_eagerly = True

    @property
    def switches_tasks(self) -> bool:
        """Whether another task may compute while rows travel (`comm/overlap.py`)."""
        return self.dispatcher is not None and self.dispatcher.switches_tasks

    def forward(self, x_nd: Tensor, experts_nk: Tensor, weights_nk: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, [n, d]; the number of experts stands for none."""
        if self.dispatcher is None:
            out_nd: Tensor = super().forward(x_nd, experts_nk, weights_nk)
            return out_nd
        wide_nk = weights_nk.to(torch.promote_types(weights_nk.dtype, torch.float32))
        routing = Routing(experts_nk, wide_nk, num_samples=1, capacity=None, drops=True)
        dispatch = self.dispatcher.start(x_nd, routing, self.received)
        dispatch.send()
        rows = dispatch.receive()
        dispatch.combine(rows, self._outputs(rows, weights_nk.dtype))
        return dispatch.finish()

    def _outputs(self, rows: ExpertRows, dtype: torch.dtype) -> Tensor:
        """Return what the module's own function makes of rows, given the dtype of its routing weights."""
        rows_rd, weights_r, sizes_e = rows.rows_rd, rows.weights_r, rows.groups.sizes_e
        if not len(rows_rd):
            return depending_on(rows_rd, weights_r, *self.parameters(recurse=False))
        self.num_experts = len(sizes_e)
        experts_r = torch.arange(len(sizes_e), device=sizes_e.device).repeat_interleave(
            sizes_e, output_size=len(rows_rd)
        )
        out_rd: Tensor = super().forward(rows_rd, experts_r[:, None], weights_r[:, None].to(dtype))
        return out_rd
