"""A layer with experts by its definition, step by step, on its recorded inputs in float64. What any step returns can be
replaced, and what follows is computed from that.

Shapes: c cells, b samples of a cell, s = c · b, t tokens, n = s · t, k experts per token, e experts, d model width,
r rows, q ranks of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.nn.experts.layer import MixtureOfExperts
from meshwright.nn.experts.router import balance_loss, drop_over_capacity, z_loss
from meshwright.nn.step_handles import AuxiliaryLoss
from meshwright.prove.placement import ExpertPlacement
from meshwright.prove.record.definitions import one_expert, scores

INPUTS = ("rows_x", "router_x", "gate_x", "up_x")
"""Attributes that hold the layer's input [s, t, d] for the experts, the router, and the shared experts' projections."""
RowChange = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Experts and routing weights of a rank's rows → others."""


class ExpertLayer:
    """A layer on the micro-batches of all data-parallel ranks; each property is a step of its definition."""

    def __init__(
        self,
        module: MixtureOfExperts,
        x_cbtd: Tensor,
        placement: ExpertPlacement,
        num_microbatches: int,
        **other: Tensor,
    ) -> None:
        """Hold a layer's recorded inputs, and what replaces steps and inputs, by name."""
        self.module, self.router, self.config = module, module.router, module.router.config
        self.x_cbtd, self.placement, self.num_microbatches = x_cbtd, placement, num_microbatches
        self.x = self.rows_x = self.router_x = self.gate_x = self.up_x = x_cbtd.flatten(0, 1)
        self.capacity = self.config.capacity(self.x.shape[1])
        vars(self).update(other)

    def but(self, **other: Tensor) -> ExpertLayer:
        """Return the layer with some steps or inputs replaced."""
        return ExpertLayer(self.module, self.x_cbtd, self.placement, self.num_microbatches, **other)

    @cached_property
    def logits(self) -> Tensor:
        """Logits of the router, [s, t, e]."""
        return self.router.gate(self.router_x)  # type: ignore[no-any-return]

    @cached_property
    def scores(self) -> Tensor:
        """Scores of experts, [s, t, e]."""
        return scores(self.router, self.logits)[0]

    @cached_property
    def experts(self) -> Tensor:
        """Chosen experts, [s, t, k]."""
        return self.router.best(self.scores.detach())

    @cached_property
    def chosen(self) -> Tensor:
        """Scores of the chosen experts, [s, t, k]."""
        return self.scores.gather(-1, self.experts)

    @cached_property
    def kept(self) -> Tensor:
        """Whether choices find a slot, [s, t, k]."""
        is_kept = torch.ones_like(self.experts, dtype=torch.bool)
        return is_kept if self.capacity is None else self.slots(self.experts, self.capacity)

    @cached_property
    def weights(self) -> Tensor:
        """Routing weights of choices, 0 where dropped, [s, t, k]."""
        return self.weighed(normalize=self.config.normalize)

    @cached_property
    def table(self) -> Tensor:
        """Routing weight of each expert for each token, [n, e]."""
        return self.table_of(self.experts)

    @cached_property
    def routed(self) -> Tensor:
        """Sum of the outputs of a token's experts, [s, t, d]."""
        return self.combine(self.table)

    @cached_property
    def shared(self) -> Tensor:
        """Output of the shared experts, [s, t, d]; zeros without any."""
        if (shared := self.module.shared) is None:
            return torch.zeros_like(self.x)
        return shared.down(F.silu(shared.gate(self.gate_x)) * shared.up(self.up_x))  # type: ignore[no-any-return]

    @property
    def out(self) -> Tensor:
        """Output of the layer, [s, t, d]."""
        return self.routed + self.shared

    def slots(self, experts_btk: Tensor, capacity: int) -> Tensor:
        """Return which choices find one of an expert's slots, in the order of the tokens."""
        return drop_over_capacity(experts_btk, self.config.num_experts, capacity)

    def weighed(self, *, normalize: bool) -> Tensor:
        """Return the routing weights of choices, normalised or not."""
        weights_stk = self.chosen / self.chosen.sum(-1, keepdim=True) if normalize else self.chosen
        return weights_stk * self.config.scale * self.kept

    def table_of(self, experts_stk: Tensor) -> Tensor:
        """Return the routing weight of each expert for each token, if these experts get the choices' weights."""
        zeros_ste = self.weights.new_zeros(*self.weights.shape[:2], self.config.num_experts)
        return zeros_ste.scatter_add(-1, experts_stk, self.weights).flatten(0, 1)

    def combine(self, table_ne: Tensor, *, at_input: bool = False, exchanged: Iterable[int] = ()) -> Tensor:
        """Return the sum of experts' outputs times routing weights.

        Args:
            table_ne: routing weights.
            at_input: whether they are applied to the experts' inputs instead.
            exchanged: experts whose gate and up are exchanged.
        """
        rows_nd = self.rows_x.flatten(0, 1)
        out_nd = torch.zeros_like(rows_nd)
        for expert in range(self.config.num_experts):
            token_r = table_ne[:, expert].nonzero()[:, 0]
            rows_rd, weight_r1 = rows_nd[token_r], table_ne[token_r, expert, None]
            before, after = (weight_r1, 1.0) if at_input else (1.0, weight_r1)
            out_rd = one_expert(self.module, expert, rows_rd * before, exchanged=expert in exchanged)
            out_nd = out_nd.index_add(0, token_r, out_rd * after)
        return out_nd.view_as(self.x)

    # ---- ranks

    @cached_property
    def owners(self) -> Tensor:
        """Position of the rank that holds each expert, [e]."""
        return torch.arange(self.config.num_experts) // self.placement.num_local

    @cached_property
    def positions(self) -> Tensor:
        """Position of each sample's rank in its group, [s]; without context parallelism."""
        position_c = torch.arange(len(self.x_cbtd)) // self.num_microbatches % self.placement.size
        return position_c.repeat_interleave(self.x_cbtd.shape[1])

    @cached_property
    def remote(self) -> Tensor:
        """Whether an expert is on another rank than the token, [n, e]."""
        return self.owners != self.positions.repeat_interleave(self.x.shape[1])[:, None]

    def with_rows(self, change: RowChange, positions: Iterable[int]) -> Tensor:
        """Return the routing weights [n, e] after a change of the rows of some positions' ranks in all groups."""
        num_tokens, num_experts = self.x_cbtd[0, ..., 0].numel(), self.config.num_experts
        shape = (-1, self.placement.size, self.num_microbatches, num_tokens, num_experts)
        found_gmqne = self.table.view(shape).transpose(1, 2).clone()
        for found_qne in found_gmqne.flatten(0, 1):
            due_ne = F.pad(found_qne.flatten(0, 1), (0, 0, 0, 1))  # and a token for empty slots
            other_ne = due_ne.clone()
            for position in positions:
                expert_r, token_r = self._rows(due_ne, position, num_tokens)
                other_ne[:, self.owners == position] = 0.0
                other_r, weight_r = change(expert_r, due_ne[token_r, expert_r])
                other_ne.index_put_((token_r, other_r), weight_r, accumulate=True)
            found_qne.copy_(other_ne[:-1].view_as(found_qne))
        return found_gmqne.transpose(1, 2).reshape(-1, num_experts)

    def _rows(self, table_ne: Tensor, position: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return experts and tokens of a rank's rows, by expert, then by the rank of the token; −1 in empty slots."""
        slots = 0 if self.capacity is None else self.capacity * self.x_cbtd.shape[1]
        experts, tokens = [], []
        for expert in (self.owners == position).nonzero()[:, 0].tolist():
            for start in range(0, self.placement.size * num_tokens, num_tokens):
                at = table_ne[start : start + num_tokens, expert].nonzero()[:, 0] + start
                tokens.append(F.pad(at, (0, max(0, slots - len(at))), value=-1))
                experts.append(torch.full_like(tokens[-1], expert))
        return torch.cat(experts), torch.cat(tokens)

    # ---- auxiliary losses

    def loss_gradient(
        self,
        handle: AuxiliaryLoss,
        counts_ste: Tensor | None = None,
        change: Callable[[Tensor], Tensor] = lambda value: value,
        *,
        divided: bool = True,
    ) -> Tensor:
        """Return the gradient of the input from an auxiliary loss, [s, t, d]; with other counts, changed logits of a
        z-loss, or scores that aren't divided by their sum."""
        x = self.x.clone().requires_grad_()
        run = self.but(router_x=x)
        if handle is self.router.z_loss:
            loss = z_loss(change(run.logits))
        else:
            counts_ste = self.counts if counts_ste is None else counts_ste
            counted_ste = scores(self.router, run.logits)[int(divided)] * counts_ste
            loss = balance_loss(torch.ones(1), counted_ste, top_k=self.config.top_k)
        return torch.autograd.grad(loss * handle.weight * handle.scale, x)[0]

    @cached_property
    def counts(self) -> Tensor:
        """Counts by which the balance loss weighs a token's probabilities, [s, 1, e]."""
        counts_s1e = self.one_hot().sum(1, keepdim=True)
        if not self.config.over_batch:
            return counts_s1e
        total_e = self.router.batch_counts.reduce(counts_s1e.sum((0, 1)))
        return total_e * self.experts[0].numel() / total_e.sum()

    def one_hot(self, *, kept_only: bool = False) -> Tensor:
        """Return 1 for the experts that tokens choose, or that have a slot for them, [s, t, e]."""
        chosen_stk = self.kept.double() if kept_only else torch.ones_like(self.chosen)
        return torch.zeros_like(self.scores).scatter(-1, self.experts, chosen_stk)
