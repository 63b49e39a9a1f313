"""A slow, obvious router and layer: one token after another, in Python."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from meshwright.nn.experts.router_config import RouterConfig, Score


class Chosen(NamedTuple):
    """What one token got."""

    experts: list[int]
    """Best first, dropped ones among them."""
    weights: list[Tensor]
    """One per expert, before dropping."""
    kept: list[bool]


def scores_of(logits_e: Tensor, config: RouterConfig) -> list[Tensor]:
    """Scores of one token."""
    if config.score is Score.SIGMOID:
        return [1 / (1 + (-one).exp()) for one in logits_e]
    total = sum(one.exp() for one in logits_e)
    return [one.exp() / total for one in logits_e]


def best(scores: list[float], config: RouterConfig) -> list[int]:
    """The top-k of the experts in the best groups; a group is as good as its two best experts together."""
    size = config.num_experts // config.num_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(config.num_groups)]
    groups.sort(key=lambda group: -sum(sorted(scores[e] for e in group)[-2:]))
    allowed = [e for group in groups[: config.top_groups] for e in group]
    return sorted(allowed, key=lambda e: -scores[e])[: config.top_k]


def route(logits_bte: Tensor, config: RouterConfig, bias: Tensor | None = None) -> list[list[Chosen]]:
    """What each token of each sample gets."""
    capacity = config.capacity(logits_bte.shape[1])
    return [_route_sample(logits_te, config, bias, capacity) for logits_te in logits_bte]


def _route_sample(logits_te: Tensor, config: RouterConfig, bias: Tensor | None, capacity: int | None) -> list[Chosen]:
    taken, found = [0] * config.num_experts, []
    for t, logits_e in enumerate(logits_te):
        scores = scores_of(logits_e, config)
        shift = [0.0] * config.num_experts if bias is None else bias.tolist()
        experts = best([one.item() + b for one, b in zip(scores, shift, strict=True)], config)
        if config.uniform:
            experts = [(t * config.top_k + k) % config.num_experts for k in range(config.top_k)]
        total = sum(scores[e] for e in experts) if config.normalize else 1.0
        kept = []
        for e in experts:
            kept.append(capacity is None or taken[e] < capacity)
            taken[e] += 1
        found.append(Chosen(experts, [scores[e] / total * config.scale for e in experts], kept))
    return found


def counts_of(sample: list[Chosen], num_experts: int) -> list[int]:
    """How many tokens of a sample chose each expert."""
    return [sum(token.experts.count(e) for token in sample) for e in range(num_experts)]


def balance_loss(logits_bte: Tensor, config: RouterConfig, *, over_batch: bool = False) -> Tensor:
    """Sum over samples of e · Σ_e f_e · p_e: f the share of choices, p the mean probability."""
    samples, total = route(logits_bte, config), logits_bte.new_zeros(())
    counts = [counts_of(sample, config.num_experts) for sample in samples]
    if over_batch:
        counts = [[sum(column) / len(samples) for column in zip(*counts, strict=True)]] * len(samples)
    for logits_te, of_sample in zip(logits_bte, counts, strict=True):
        tokens = [scores_of(logits_e, config) for logits_e in logits_te]
        for e, count in enumerate(of_sample):
            share = count / (config.top_k * len(tokens))
            probability = sum(scores[e] / sum(scores) for scores in tokens) / len(tokens)
            total = total + config.num_experts * share * probability
    return total


def z_loss(logits_bte: Tensor) -> Tensor:
    """Sum over samples of the mean over tokens of (log Σ exp)²."""
    total = logits_bte.new_zeros(())
    for logits_te in logits_bte:
        total = total + sum(sum(one.exp() for one in e).log() ** 2 for e in logits_te) / len(logits_te)
    return total
