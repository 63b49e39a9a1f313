"""Rows in a fixed number of slots per expert, so that shapes do not depend on routing (for capture in a CUDA graph).

Slots without a token hold zeros and have the weight zero. Nothing is read on the host.

Shapes: n tokens, k experts per token, c = n · k choices, d model width, e experts, s = experts · slots.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.nn.experts.router import Routing
from meshwright.nn.experts.row_map import RowMap, sort_by_expert


class PaddedSlots:
    """Slots of one routing: the token of each slot, and its choice of the expert."""

    def __init__(self, routing: Routing, num_experts: int) -> None:
        """Assign slots by expert, then token.

        Args:
            routing: routing with a capacity, which drops the choices that have no slot.
            num_experts: number of experts.
        """
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
