"""Bytes that expert parallelism sends: rows to the ranks that hold a token's experts, and back.

A token travels once to each rank with at least one of its experts. Which ranks these are is known before a run only if
routing is forced to be uniform. Otherwise a router is modelled as choosing sets of k experts at random, all equally
likely or, after a run, with the experts' counts as inclusion probabilities (conditional Poisson sampling; Hájek 1964).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshwright.plan.run_plan import BYTES, ExpertLayer, RunPlan
from meshwright.plan.stage_sizes import COUNT_BYTES


@dataclass(frozen=True)
class RankLoad:
    """Mean number of a sample's tokens for each rank of ep."""

    tokens: tuple[float, ...]
    """Tokens with at least one expert on the rank: rows that travel to it. Under a capacity, its slots."""
    choices: tuple[float, ...]
    """Choices of an expert on the rank."""


@dataclass(frozen=True)
class LoadedExperts(ExpertLayer):
    """An expert layer with a load that is given, which all ranks have."""

    load: RankLoad = RankLoad((), ())
    busiest: float = 1.0
    """Tokens of a rank's experts, relative to a balanced load."""


@dataclass(frozen=True)
class SentToRank:
    """Bytes per step that one layer sends to another rank."""

    rank: int
    num_bytes: int
    lower_bound: int
    """Bytes of one row per token and rank, and direction, without weights and counts."""
    row_per_expert: int
    """Bytes of one row per choice of an expert instead."""


def sent_by_layer(plan: RunPlan, rank: int, layer: ExpertLayer, load: RankLoad | None = None) -> Iterator[SentToRank]:
    """Yield what a layer's dispatches and combines send in a step, forward and backward, to every other rank of ep.

    Args:
        plan: plan of the run.
        rank: rank on the mesh.
        layer: the layer.
        load: load of the ranks; predicted if None.
    """
    line = plan.mesh.line(rank, layer.axes)
    load = load or predicted_load(layer, plan.rank_tokens, len(line))
    own, compute = line.index(rank), plan.edge.dtype
    row, weight = layer.width * BYTES[compute], 2 * max(4, BYTES[compute])  # a weight and the row that it is for
    samples, times = plan.batch.samples, plan.batch.num_microbatches
    counts = (layer.num_experts // len(line) + 1) * COUNT_BYTES
    if layer.capacity is not None:
        weight, counts = weight // 2, 0  # each slot has its row
    for index, other in enumerate(line):
        if index == own:
            continue
        # Rows go out and come back for this rank's tokens and for the other's; so do their gradients.
        tokens = 2 * samples * (load.tokens[index] + load.tokens[own])
        choices = samples * (load.choices[index] + load.choices[own])
        yield SentToRank(
            other,
            num_bytes=times * round(tokens * row + choices * weight + counts),
            lower_bound=times * round(tokens * row),
            row_per_expert=times * round(2 * choices * row),
        )


def describe_rows(plan: RunPlan, rank: int) -> str:
    """Compare what a rank's dispatches send with the lower bound and with a row per expert; empty without experts."""
    layers = [kind.experts for number in plan.stages_of(rank) for kind, _ in plan.held(plan.stages[number])]
    sent = [one for layer in layers if layer and layer.axes for one in sent_by_layer(plan, rank, layer)]
    if not sent:
        return ""
    if any(layer and layer.capacity is not None for layer in layers):
        return "one row per slot of an expert's capacity, with or without a token"
    num_bytes, bound = sum(one.num_bytes for one in sent), max(1, sum(one.lower_bound for one in sent))
    saved = 1.0 - bound / max(1, sum(one.row_per_expert for one in sent))
    return f"one row per token and rank: {num_bytes / bound:.3f} × the lower bound, {saved:.0%} less than per expert"


@lru_cache(maxsize=64)
def predicted_load(layer: ExpertLayer, num_tokens: int, num_ranks: int) -> RankLoad:
    """Return the load of each rank, unless it is given that expected for sets of k random experts; exact with uniform
    routing, and under a capacity, where every slot counts."""
    if isinstance(layer, LoadedExperts):
        return layer.load
    if layer.capacity is not None:
        slots = float(layer.capacity * (layer.num_experts // num_ranks))
        return RankLoad((slots,) * num_ranks, (slots,) * num_ranks)
    if layer.uniform:
        return _uniform_load(layer, num_tokens, num_ranks)
    hits = (_hit_probability(layer, num_ranks, rank) for rank in range(num_ranks))
    return RankLoad(tuple(num_tokens * hit for hit in hits), (num_tokens * layer.top_k / num_ranks,) * num_ranks)


def _uniform_load(layer: ExpertLayer, num_tokens: int, num_ranks: int) -> RankLoad:
    """Count the tokens and choices of each rank if token i chooses experts i · k, i · k + 1, …"""
    per_rank = layer.num_experts // num_ranks
    tokens, choices = [0] * num_ranks, [0] * num_ranks
    for token in range(num_tokens):
        ranks = [(token * layer.top_k + i) % layer.num_experts // per_rank for i in range(layer.top_k)]
        for rank in ranks:
            choices[rank] += 1
        for rank in set(ranks):
            tokens[rank] += 1
    return RankLoad(tuple(map(float, tokens)), tuple(map(float, choices)))


def _hit_probability(layer: ExpertLayer, num_ranks: int, rank: int) -> float:
    """Return the probability that some of a token's experts are on a rank."""
    per_rank, in_group = layer.num_experts // num_ranks, layer.num_experts // layer.num_groups
    here = Counter(expert // in_group for expert in range(rank * per_rank, (rank + 1) * per_rank))
    # Ways to choose groups, by the number of groups and of experts on the rank in them.
    ways: Counter[tuple[int, int]] = Counter({(0, 0): 1})
    for group in range(layer.num_groups):
        for (chosen, on_rank), count in tuple(ways.items()):
            if chosen < layer.top_groups:
                ways[chosen + 1, on_rank + here[group]] += count
    reachable, total = layer.top_groups * in_group, math.comb(layer.num_groups, layer.top_groups)
    missed = sum(
        count / total * math.comb(reachable - on_rank, layer.top_k) / math.comb(reachable, layer.top_k)
        for (chosen, on_rank), count in ways.items()
        if chosen == layer.top_groups
    )
    return 1.0 - missed


def counted_load(counts: Sequence[float], *, top_k: int, num_tokens: int, num_ranks: int) -> RankLoad:
    """Return the load of each rank expected from the experts' counts.

    Args:
        counts: tokens that chose each expert, over any number of samples.
        top_k: experts per token.
        num_tokens: tokens per sample.
        num_ranks: ranks of ep.
    """
    if not any(counts):
        return RankLoad((0.0,) * num_ranks, (0.0,) * num_ranks)
    total = sum(counts) / top_k
    shares = [min(count / total, 1.0 - 1e-9) for count in counts]
    odds = [share / (1.0 - share) for share in shares]
    per_rank, every = len(counts) // num_ranks, _symmetric(odds, top_k)
    tokens, choices = [], []
    for start in range(0, len(counts), per_rank):
        others = odds[:start] + odds[start + per_rank :]
        tokens.append(num_tokens * (1.0 - _symmetric(others, top_k) / every))
        choices.append(num_tokens * sum(shares[start : start + per_rank]))
    return RankLoad(tuple(tokens), tuple(choices))


def _symmetric(odds: Sequence[float], degree: int) -> float:
    """Return the elementary symmetric polynomial: the sum over all sets of `degree` experts of the product of odds."""
    sums = [1.0] + [0.0] * degree
    for one in odds:
        for size in range(degree, 0, -1):
            sums[size] += one * sums[size - 1]
    return sums[degree]
