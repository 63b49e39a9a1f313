"""SwiGLU experts (Shazeer 2020), computed for all tokens sent to them at once.

Shapes: e experts, r rows, d model width, f hidden width.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.nn.deferred_weight_gradients import WeightGradStore
from meshwright.nn.experts.grouped_linear import RowGroups, grouped_linear


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
