"""Load of experts: what a router counts, the losses that keep it balanced, and the bias that does so without a loss.

The scope of a balance loss is a sample, or the global batch, never a rank's micro-batch, whose size and contents depend
on the layout.

Shapes: b samples, t tokens, e experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meshwright.nn.experts.row_map import count
from meshwright.nn.step_handles import LoadCounter, StepHandle


class ExpertLoad(LoadCounter):
    """Tokens sent to each expert since the start of training, and an optional bias that balances them.

    Each step, the bias of every expert with less than the mean load rises by `bias_rate`, and that of every expert with
    more falls (auxiliary-loss-free balancing; Wang et al. 2024, algorithm 1).
    """

    bias: Tensor | None

    def __init__(self, num_experts: int, *, bias_rate: float = 0.0) -> None:
        super().__init__(num_experts)
        self.bias_rate = bias_rate
        self.register_buffer("bias", torch.zeros(num_experts) if bias_rate else None)

    @torch.no_grad()
    def commit(self, total: Tensor) -> None:
        """Add the step's counts, summed over all ranks, and update the bias."""
        if self.bias is not None:
            # Integers, so that every rank and layout gets the same signs.
            surplus_e = total * total.numel() - total.sum()
            self.bias.sub_(surplus_e.sign().to(self.bias.dtype), alpha=self.bias_rate)
        super().commit(total)


class BatchCounts(StepHandle):
    """Counts of the global batch, from those of a micro-batch that is a rank's whole share of it."""

    def __init__(self) -> None:
        super().__init__()
        self.reduce: Callable[[Tensor], Tensor] = lambda counts: counts
        """Sum over all ranks with different tokens; set by whoever knows them."""

    def discard(self) -> None:
        """Do nothing: the counts belong to one forward."""


class SampleCounts(StepHandle):
    """Counts of full samples, from those of the tokens on this rank; set by whoever knows which ranks share samples."""

    def __init__(self) -> None:
        super().__init__()
        self.reduce: Callable[[Tensor], Tensor] = lambda counts: counts
        """Sum over the ranks that share a sample's tokens."""
        self.num_parts = 1
        """Number of these ranks; all hold the same number of tokens."""

    def discard(self) -> None:
        """Do nothing: the counts belong to one forward."""


def sample_counts(experts_btk: Tensor, num_experts: int) -> Tensor:
    """Return how many of each sample's tokens chose each expert, int64 [b, e]."""
    num_samples = experts_btk.shape[0]
    sample_b = torch.arange(num_samples, device=experts_btk.device) * num_experts
    flat = (experts_btk.flatten(1) + sample_b[:, None]).flatten()
    return count(flat, num_samples * num_experts).view(num_samples, num_experts)


def balance_loss(counts_be: Tensor, probabilities_bte: Tensor, *, top_k: int, num_parts: int = 1) -> Tensor:
    """Return the sum over samples of e · Σ_e f_e · p_e (Fedus et al. 2022, equation 4), or this rank's part of it.

    Args:
        counts_be: tokens that chose each expert, per sample, or of the global batch divided by its samples.
        probabilities_bte: the router's probabilities.
        top_k: experts per token.
        num_parts: ranks that share a sample's tokens equally; the loss is the sum of their parts.
    """
    num_tokens, num_experts = probabilities_bte.shape[1] * num_parts, probabilities_bte.shape[2]
    share_be = counts_be.to(probabilities_bte.dtype) * (num_experts / (top_k * max(1, num_tokens)))
    return (share_be * _token_mean(probabilities_bte, num_parts)).sum()


def z_loss(logits_bte: Tensor, *, num_parts: int = 1) -> Tensor:
    """Return the sum over samples of the mean squared logsumexp of a token's logits (Zoph et al. 2022, equation 5), or
    this rank's part of it."""
    return _token_mean(logits_bte.logsumexp(-1).square(), num_parts).sum()


def _token_mean(x_bt: Tensor, num_parts: int) -> Tensor:
    """Return the sum over tokens on this rank, divided by the number of a sample's tokens; 0 without any."""
    return x_bt.sum(1) / max(1, x_bt.shape[1] * num_parts)


def drop_over_capacity(experts_btk: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Return which choices find a slot [b, t, k]: in each sample, an expert's first `capacity` tokens in order."""
    num_samples, num_choices = experts_btk.shape[0], experts_btk.shape[1] * experts_btk.shape[2]
    flat_bc = experts_btk.flatten(1)
    order_bc = flat_bc.argsort(dim=1, stable=True)
    ends_be = sample_counts(experts_btk, num_experts).cumsum(1)
    starts_be = torch.cat((ends_be.new_zeros(num_samples, 1), ends_be[:, :-1]), 1)
    places_bc = torch.arange(num_choices, device=flat_bc.device).expand_as(order_bc)
    slot_bc = places_bc - starts_be.gather(1, flat_bc.gather(1, order_bc))
    return torch.empty_like(slot_bc).scatter_(1, order_bc, slot_bc).lt(capacity).view_as(experts_btk)
