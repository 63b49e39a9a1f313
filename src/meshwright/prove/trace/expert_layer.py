"""A layer with experts, run once more on a recorded input in float64, expert by expert: with other scores, choices,
routing weights or rows.

Shapes: b samples, t tokens, n = b · t, k experts per token, e experts, d model width, c = t · k choices, r rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.nn.experts.layer import MixtureOfExperts
from meshwright.nn.experts.router import drop_over_capacity, sample_counts
from meshwright.nn.experts.router_config import Score
from meshwright.prove.judge.tensors import Array
from meshwright.prove.placement import ExpertPlacement
from meshwright.prove.record.definitions import one_expert, scores

INPUTS = ("rows", "router", "shared gate", "shared up")
"""What takes a layer's input."""


class Choice(NamedTuple):
    """Choices of tokens, each [b, t, k]."""

    experts_btk: Tensor
    scores_btk: Tensor
    kept_btk: Tensor
    """Whether they find a slot."""


@dataclass(frozen=True)
class Run:
    """One computation of a layer; the defaults are right."""

    score: Callable[[Cell, Tensor], Tensor] = lambda one, logits: scores(one.layer.router, logits)[0]
    """Logits → scores, [b, t, e]."""
    choose: Callable[[Cell, Tensor], Tensor] = lambda one, scores_bte: one.layer.router.best(scores_bte)
    """Scores → experts, [b, t, k]."""
    keep: Callable[[Cell, Tensor, Tensor], Tensor] = lambda one, experts_btk, _: one.kept(experts_btk)
    """Experts and their scores → which choices find a slot."""
    weigh: Callable[[Cell, Choice], Tensor] = lambda one, choice: one.weights(choice)
    """Choices → routing weights, 0 where dropped."""
    send: Callable[[Cell, Tensor], Tensor] = lambda one, experts_btk: experts_btk
    """Experts → those that compute in their places."""
    drop: Callable[[Cell], Tensor] | None = None
    """Outputs that tokens don't get, [n, e]."""
    lose: tuple[str, ...] = ()
    """What gets no gradient from experts of other ranks: `rows`, `weights`."""
    at_input: bool = False
    """Whether weights are applied to the experts' inputs."""
    exchanged: range = range(0)
    """Experts whose gate and up are exchanged."""
    shared: float = 1.0
    """Factor of the shared experts."""
    shift: int = 0
    """Places by which tokens' outputs are shifted."""


@dataclass(frozen=True)
class Cell:
    """A layer's input in a micro-batch, in float64."""

    layer: MixtureOfExperts
    x_btd: Tensor
    dp_rank: int
    placement: ExpertPlacement
    before: tuple[Tensor, ...] = ()
    """Inputs in the rank's micro-batches before this one."""

    def right_experts(self, x_btd: Tensor | None = None) -> Tensor:
        """Return the chosen experts, [b, t, k]."""
        with torch.no_grad():
            return self.layer.router.best(self.scores(self.x_btd if x_btd is None else x_btd))

    def scores(self, x_btd: Tensor) -> Tensor:
        """Return the experts' scores, [b, t, e]."""
        return scores(self.layer.router, self.layer.router.gate(x_btd))[0]

    def on_rank_ne(self, position: int) -> Tensor:
        """Return whether an expert is on the rank at a position of its group, [n, e]."""
        owners = torch.arange(self.placement.num_experts) // self.placement.num_local
        return (owners == position).expand(self.x_btd[..., 0].numel(), -1)

    def remote_ne(self) -> Tensor:
        """Return whether an expert is on another rank than the token, [n, e]."""
        return ~self.on_rank_ne(self.placement.position(self.dp_rank))

    def run(self, how: Run, *inputs: Tensor) -> Tensor:
        """Return the layer's output, [b, t, d]; `INPUTS` may be given each for itself."""
        rows_btd, router_btd, gate_btd, up_btd = inputs or (self.x_btd,) * len(INPUTS)
        weights_ne, rows_nd = self.weights_ne(how, router_btd), rows_btd.flatten(0, 1)
        lost_ne = self.remote_ne() if how.lose else None
        out_nd = torch.zeros_like(rows_nd)
        for expert in range(self.placement.num_experts):
            weight_n1, x_nd = weights_ne[:, expert, None], rows_nd
            if lost_ne is not None and "rows" in how.lose:
                x_nd = torch.where(lost_ne[:, expert, None], x_nd.detach(), x_nd)
            if lost_ne is not None and "weights" in how.lose:
                weight_n1 = torch.where(lost_ne[:, expert, None], weight_n1.detach(), weight_n1)
            if how.at_input:
                x_nd, weight_n1 = x_nd * weight_n1, (weight_n1 != 0).to(x_nd.dtype)
            out_nd = out_nd + weight_n1 * one_expert(self.layer, expert, x_nd, exchanged=expert in how.exchanged)
        out_btd = out_nd.roll(how.shift, 0).view_as(self.x_btd)
        if (shared := self.layer.shared) is None:
            return out_btd
        shared_btd: Tensor = shared.down(F.silu(shared.gate(gate_btd)) * shared.up(up_btd))
        return out_btd + how.shared * shared_btd

    def weights_ne(self, how: Run, x_btd: Tensor | None = None) -> Tensor:
        """Return the routing weight of each expert for each token, [n, e]."""
        choice, weights_btk = self.choices(how, x_btd)
        sent_btk = how.send(self, choice.experts_btk)
        zeros = weights_btk.new_zeros(*weights_btk.shape[:2], self.placement.num_experts)
        weights_ne = zeros.scatter_add(-1, sent_btk, weights_btk).flatten(0, 1)
        return weights_ne if how.drop is None else weights_ne * ~how.drop(self)

    def choices(self, how: Run, x_btd: Tensor | None = None) -> tuple[Choice, Tensor]:
        """Return the choices and their routing weights."""
        scores_bte = how.score(self, self.layer.router.gate(self.x_btd if x_btd is None else x_btd))
        experts_btk = how.choose(self, scores_bte.detach())
        found_btk = scores_bte.gather(-1, experts_btk)
        choice = Choice(experts_btk, found_btk, how.keep(self, experts_btk, found_btk.detach()))
        return choice, how.weigh(self, choice)

    def weights(self, choice: Choice, *, other: bool = False) -> Tensor:
        """Return the routing weights of choices; normalised where they are not to be, or the reverse, if `other`."""
        config, weights_btk = self.layer.router.config, choice.scores_btk
        if config.normalize is not other:
            weights_btk = weights_btk / weights_btk.sum(-1, keepdim=True)
        return weights_btk * config.scale * choice.kept_btk

    def kept(self, experts_btk: Tensor, capacity: int | None = None) -> Tensor:
        """Return which choices find one of an expert's slots, in order of the tokens: as configured, or others."""
        config = self.layer.router.config
        capacity = config.capacity(experts_btk.shape[1]) if capacity is None else capacity
        if capacity is None:
            return torch.ones_like(experts_btk, dtype=torch.bool)
        return drop_over_capacity(experts_btk, config.num_experts, capacity)


def of_microbatch(one: Cell, experts_btk: Tensor, _: Tensor) -> Tensor:
    """Count the capacity over a micro-batch."""
    capacity = one.layer.router.config.capacity(experts_btk.shape[1]) or 0
    return one.kept(experts_btk.reshape(1, -1, experts_btk.shape[2]), len(experts_btk) * capacity).view_as(experts_btk)


def by_score(one: Cell, experts_btk: Tensor, scores_btk: Tensor) -> Tensor:
    """Give an expert's slots to the tokens with the best scores."""
    order_bc = scores_btk.flatten(1).argsort(-1, descending=True)
    sorted_bc, capacity = (
        experts_btk.flatten(1).gather(1, order_bc),
        one.layer.router.config.capacity(experts_btk.shape[1]),
    )
    kept_bc = one.kept(sorted_bc[..., None], capacity)[..., 0]
    return torch.zeros_like(kept_bc).scatter(1, order_bc, kept_bc).view_as(experts_btk)


def by_moving_bias(one: Cell, scores_bte: Tensor) -> Tensor:
    """Choose by the bias that follows from the counts of the micro-batches before."""
    router, load = one.layer.router, one.layer.router.load
    held = load.bias
    assert held is not None, "only a bias moves"
    try:
        for x_btd in one.before:
            counts_e = sample_counts(one.right_experts(x_btd), one.placement.num_experts).sum(0)
            step_e = (counts_e * counts_e.numel() - counts_e.sum()).sign()
            load.bias = load.bias - load.bias_rate * step_e  # type: ignore[operator]
        return router.best(scores_bte)
    finally:
        load.bias = held


def after_drops(one: Cell, choice: Choice) -> Tensor:
    """Normalise the routing weights of the choices that are left."""
    left_btk = choice.scores_btk * choice.kept_btk
    return left_btk / left_btk.sum(-1, keepdim=True).clamp_min(1e-300) * one.layer.router.config.scale


def once_each(one: Cell, choice: Choice) -> Tensor:
    """Count a token's output of a rank once for each of its experts there."""
    ranks_btk = choice.experts_btk // one.placement.num_local
    return one.weights(choice) * (ranks_btk[..., None] == ranks_btk[..., None, :]).sum(-1)


def other_score(one: Cell, logits_bte: Tensor) -> Tensor:
    is_softmax = one.layer.router.config.score is Score.SOFTMAX
    return logits_bte.sigmoid() if is_softmax else logits_bte.softmax(-1)


def of_local(one: Cell, logits_bte: Tensor) -> Tensor:
    """Return a softmax over each rank's experts."""
    return logits_bte.view(*logits_bte.shape[:-1], one.placement.size, -1).softmax(-1).flatten(-2)


def on_own_rank(one: Cell, experts_btk: Tensor) -> Tensor:
    """Return the experts at the same place on the token's own rank."""
    local = one.placement.num_local
    return experts_btk % local + one.placement.position(one.dp_rank) * local


def biased(one: Cell, logits_bte: Tensor) -> Tensor:
    bias = one.layer.router.load.bias
    return scores(one.layer.router, logits_bte)[0] + (0.0 if bias is None else bias)


def previous(one: Cell, scores_bte: Tensor) -> Tensor:
    return one.right_experts(one.before[-1] if one.before else None)


class Rows(NamedTuple):
    """Rows of the experts on a rank, by expert, then by the rank of the token; r of them."""

    expert_r: Tensor
    source_r: Tensor
    """Position of the rank whose token it is."""
    token_r: Tensor
    """−1 in an empty slot."""
    weight_r: Tensor

    def with_experts(self, expert_r: Tensor) -> Rows:
        """Return the rows, given to other experts."""
        return Rows(expert_r, self.source_r, self.token_r, self.weight_r)

    def weighted(self, weight_r: Tensor) -> Rows:
        """Return the rows with other routing weights."""
        return Rows(self.expert_r, self.source_r, self.token_r, weight_r)


def rows_of(group: Sequence[Cell], position: int) -> Rows:
    """Return the rows of the rank at a position of a group of ep ranks."""
    local, found = group[0].placement.num_local, []
    choices = [one.choices(Run()) for one in group]
    for expert in range(position * local, (position + 1) * local):
        for source, (choice, weights_btk) in enumerate(choices):
            length, top_k = choice.experts_btk.shape[1:]
            is_here = (choice.experts_btk == expert) & choice.kept_btk
            at = is_here.flatten().nonzero()[:, 0]
            capacity = group[0].layer.router.config.capacity(length)
            empty = 0 if capacity is None else len(is_here) * capacity - len(at)
            found.append((
                torch.full((len(at) + empty,), expert), torch.full((len(at) + empty,), source),
                F.pad(at // top_k, (0, empty), value=-1), F.pad(weights_btk.flatten()[at], (0, empty)),
            ))  # fmt: skip
    return Rows(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _without(rows: Rows, lost: Tensor) -> Rows:
    return rows.weighted(rows.weight_r.index_fill(0, lost, 0.0))


def _reversed_groups(rows: Rows) -> Rows:
    experts, sizes = torch.unique(rows.expert_r, return_counts=True)
    return rows.with_experts(experts.repeat_interleave(sizes.flip(0)))


def _last_of_each(rows: Rows) -> Rows:
    return _without(rows, torch.bincount(rows.expert_r)[torch.unique(rows.expert_r)].cumsum(0) - 1)


def _swapped(rows: Rows) -> Rows:
    """Return slots in the order in which those by expert and rank are if they are read by rank and expert."""
    sizes = (len(torch.unique(rows.source_r)), len(torch.unique(rows.expert_r)))
    if len(rows.token_r) % (sizes[0] * sizes[1]):
        return rows  # rows of different numbers, not slots
    return Rows(*(part.view(*sizes, -1).transpose(0, 1).flatten() for part in rows))


ROWS: tuple[tuple[str, Callable[[Rows], Rows]], ...] = (
    ("the last row of each expert is missing{}: offsets of the groups of rows are off by one", _last_of_each),
    (
        "the last row is missing{}: the end of the rows is off by one",
        lambda r: _without(r, torch.tensor([len(r[0]) - 1])),
    ),
    ("each row has the routing weight of the row before it{}", lambda r: r.weighted(r.weight_r.roll(1))),
    ("each row has the routing weight of the row after it{}", lambda r: r.weighted(r.weight_r.roll(-1))),
    ("the groups of rows are given to the experts in reverse order{}", _reversed_groups),
    ("slots are returned by expert and rank instead of by rank and expert{}", _swapped),
)
"""Faults in the rows of a rank, which are ordered by expert."""


def sending(table: list[int]) -> Run:
    """Let other experts compute."""
    return Run(send=lambda one, experts_btk: torch.tensor(table)[experts_btk])


def combined(group: Sequence[Cell], due: Sequence[Rows], rows: Sequence[Rows]) -> list[Array]:
    """Return the outputs of a group's cells from the rows of its ranks; a row's output goes to its token as `due`."""
    outs = [torch.zeros_like(one.x_btd.flatten(0, 1)) for one in group]
    for of, r in zip(due, rows, strict=True):
        x_rd = torch.stack([one.x_btd.flatten(0, 1) for one in group])[r.source_r, r.token_r]
        out_rd = torch.zeros_like(x_rd)
        for expert in torch.unique(r.expert_r).tolist():
            at = r.expert_r == expert
            out_rd[at] = one_expert(group[0].layer, expert, x_rd[at]) * r.weight_r[at, None]
        for source, out_nd in enumerate(outs):
            at = (of.source_r == source) & (of.token_r >= 0)
            out_nd.index_add_(0, of.token_r[at], out_rd[at])
    shared = group[0].layer.shared
    found = [out.view_as(one.x_btd) for out, one in zip(outs, group, strict=True)]
    return [(out if shared is None else out + shared(one.x_btd)).numpy() for out, one in zip(found, group, strict=True)]
