"""Routing of tokens to experts: softmax or sigmoid scores, top-k within groups, and what keeps the load of experts
balanced, losses or a bias.

Chosen experts are kept for a recomputed forward (`nn/kept_results.py`); scores are recomputed. The scope of a balance
loss is a sample, or the global batch, never a rank's micro-batch, whose size and contents depend on the layout.

Shapes: b samples, t tokens, d model width, e experts, k experts per token, n = b · t.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.nn.experts.grouped_linear import count
from meshwright.nn.experts.router_config import RouterConfig, Score
from meshwright.nn.kept_results import ForwardCache
from meshwright.nn.linear import WeightGradStore, computed_or_deferred
from meshwright.nn.step_handles import AuxiliaryLoss, LoadCounter, StepHandle


@dataclass(frozen=True)
class Routing:
    """Experts and weights of each token."""

    experts_nk: Tensor
    """int64; the number of experts stands for a dropped choice."""
    weights_nk: Tensor
    """At least float32; 0 for a dropped choice."""
    num_samples: int
    capacity: int | None
    """Slots per expert and sample; choices beyond it are dropped. None without a limit."""
    drops: bool = False
    """Whether choices are dropped without a capacity, by a router of your own."""


class Router(nn.Module):
    """Router of one layer."""

    def __init__(self, dim: int, config: RouterConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = Gate(dim, config.num_experts)
        self.load = ExpertLoad(config.num_experts, bias_rate=config.bias_rate)
        self.chosen = ForwardCache()
        self.batch_counts, self.sample_counts = BatchCounts(), SampleCounts()
        self.balance_loss = AuxiliaryLoss("balance", config.balance_loss) if config.balance_loss else None
        self.z_loss = AuxiliaryLoss("z", config.z_loss) if config.z_loss else None

    def forward(self, x_btd: Tensor) -> Routing:
        """Choose experts for every token, and record this micro-batch's losses and load."""
        logits_bte = self.gate(x_btd)
        scores_bte, probabilities_bte = self._scores(logits_bte)
        num_parts = self.sample_counts.num_parts
        experts_btk, kept_btk, share_be = self.chosen.recall(lambda: self._choose(scores_bte.detach()))
        weights_btk = scores_bte.gather(-1, experts_btk)
        if self.config.normalize:
            weights_btk = weights_btk / _positive(weights_btk.sum(-1, keepdim=True))
        weights_btk = weights_btk * self.config.scale
        if self.balance_loss is not None:
            loss = balance_loss(share_be, probabilities_bte, top_k=self.config.top_k, num_parts=num_parts)
            weights_btk = self.balance_loss(weights_btk, loss)
        if self.z_loss is not None:
            weights_btk = self.z_loss(weights_btk, z_loss(logits_bte, num_parts=num_parts))
        return Routing(
            torch.where(kept_btk, experts_btk, self.config.num_experts).flatten(0, 1),
            (weights_btk * kept_btk).flatten(0, 1),
            num_samples=x_btd.shape[0],
            capacity=self.config.capacity(x_btd.shape[1]),
        )

    def _scores(self, logits_bte: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores, and probabilities for the balance loss."""
        if self.config.score is Score.SOFTMAX:
            scores_bte = logits_bte.softmax(-1)
            return scores_bte, scores_bte
        scores_bte = logits_bte.sigmoid()
        return scores_bte, scores_bte / _positive(scores_bte.sum(-1, keepdim=True))

    def _choose(self, scores_bte: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return experts and whether they have a slot [b, t, k], and the counts for the balance loss [b, e]."""
        config = self.config
        if config.uniform:
            num_choices = scores_bte.shape[1] * config.top_k
            choices = torch.arange(num_choices, device=scores_bte.device) % config.num_experts
            experts_btk = choices.view(1, -1, config.top_k).repeat(len(scores_bte), 1, 1)
        else:
            experts_btk = self.best(scores_bte)
        counts_be = sample_counts(experts_btk, config.num_experts)
        self.load.add(counts_be.sum(0))
        capacity = config.capacity(scores_bte.shape[1])
        kept_btk = torch.ones_like(experts_btk, dtype=torch.bool)
        if capacity is not None:
            kept_btk = drop_over_capacity(experts_btk, config.num_experts, capacity)
        if not config.balance_loss or not self.training:
            return experts_btk, kept_btk, counts_be
        if not config.over_batch:
            return experts_btk, kept_btk, self.sample_counts.reduce(counts_be)
        total_e = self.batch_counts.reduce(counts_be.sum(0))
        choices_per_sample = self.sample_counts.num_parts * experts_btk.shape[1] * experts_btk.shape[2]
        num_samples = total_e.sum() / choices_per_sample
        return experts_btk, kept_btk, (total_e / num_samples).expand_as(counts_be)

    def best(self, scores_bte: Tensor) -> Tensor:
        """Return the experts with the best scores of each token, [b, t, k], best first."""
        config = self.config
        if self.load.bias is not None:
            scores_bte = scores_bte + self.load.bias
        if config.num_groups > 1:
            per_group = config.num_experts // config.num_groups
            scores_btgm = scores_bte.view(*scores_bte.shape[:2], config.num_groups, per_group)
            best_btg = scores_btgm.topk(min(2, scores_btgm.shape[-1]), -1).values.sum(-1)
            groups_btg = best_btg.topk(config.top_groups, -1).indices
            allowed_btg = torch.zeros_like(best_btg, dtype=torch.bool).scatter_(-1, groups_btg, True)
            scores_bte = scores_btgm.masked_fill(~allowed_btg[..., None], -torch.inf).flatten(-2)
        return scores_bte.topk(config.top_k, -1).indices


class Gate(nn.Linear):
    """Linear layer from tokens to expert logits, computed in at least float32; can defer its weight gradient."""

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__(dim, num_experts, bias=False)
        self.weight_gradients: WeightGradStore | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map […, d] to logits […, e]."""
        logits: Tensor = _Gate.apply(x, self.weight, self.weight_gradients)  # type: ignore[no-untyped-call]
        return logits

    def deferred_parameters(self) -> Iterable[nn.Parameter]:
        """Return the weight."""
        return [self.get_parameter("weight")]


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_ed: Tensor, store: WeightGradStore | None) -> Tensor:
        ctx.save_for_backward(x, weight_ed)
        ctx.weight, ctx.store = weight_ed if store is not None else None, store
        return _wide(x) @ _wide(weight_ed).T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, weight_ed), (gradient,) = ctx.saved_tensors, gradients
        needs_x, needs_weight, _ = ctx.needs_input_grad
        grad_x = (gradient @ _wide(weight_ed)).to(x.dtype) if needs_x else None
        grad_weight = computed_or_deferred(ctx.store, ctx.weight, _gate_gradient, x, gradient) if needs_weight else None
        return grad_x, grad_weight, None


def _gate_gradient(x: Tensor, gradient: Tensor) -> Tensor:
    """Return the weight gradient [e, d], in the dtype of the weight, which is that of `x`."""
    return (gradient.flatten(0, -2).T @ _wide(x).flatten(0, -2)).to(x.dtype)


def _positive(sums: Tensor) -> Tensor:
    """Return sums of scores that may have underflowed to 0, as positive numbers."""
    return sums.clamp_min(torch.finfo(sums.dtype).tiny)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


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


class _SharedCounts(StepHandle):
    """Counts that ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.reduce: Callable[[Tensor], Tensor] = lambda counts: counts
        """Sum over these ranks; set by whoever knows them."""


class BatchCounts(_SharedCounts):
    """Counts of the global batch, from those of a micro-batch that is a rank's whole share of it; the ranks are all
    with different tokens."""


class SampleCounts(_SharedCounts):
    """Counts of full samples, from those of the tokens on this rank; the ranks are those that share a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.num_parts = 1
        """Number of these ranks; all hold the same number of tokens."""


def sample_counts(experts_btk: Tensor, num_experts: int) -> Tensor:
    """Return how many of each sample's tokens chose each expert, int64 [b, e]."""
    num_samples = experts_btk.shape[0]
    sample_b = torch.arange(num_samples, device=experts_btk.device) * num_experts
    flat = (experts_btk.flatten(1) + sample_b[:, None]).flatten()
    return count(flat, num_samples * num_experts).view(num_samples, num_experts)


def balance_loss(counts_be: Tensor, probabilities_bte: Tensor, *, top_k: int, num_parts: int = 1) -> Tensor:
    """Return the sum over samples of e · Σ_e f_e · p_e (Fedus et al. 2022, equation 4), or this rank's part of it.

    The counts are per sample, or of the global batch divided by its samples. `num_parts` ranks share a sample's tokens
    equally; the loss is the sum of their parts.
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
