"""Explain a layer with experts whose input is right: run it once more on the recorded inputs with other choices,
weights and rows, and fit its gradient by parts.

Shapes: c cells, b samples of a cell, s = c · b, t tokens, n = s · t, k experts per token, e experts, d model width,
r rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from meshwright.nn.experts.layer import MixtureOfExperts
from meshwright.nn.experts.router_config import Score
from meshwright.nn.step_handles import AuxiliaryLoss
from meshwright.prove.judge.tensors import NOTHING_FITS, LayoutCounts, close, factor_cause
from meshwright.prove.placement import ExpertPlacement
from meshwright.prove.record.definitions import best_experts, one_expert
from meshwright.prove.result import number_words
from meshwright.prove.trace.expert_layer import INPUTS, ExpertLayer, RowChange
from meshwright.prove.trace.first_difference import FirstDifference, LocalValue, Trace, take
from meshwright.prove.trace.probe import GRADIENT
from meshwright.prove.trace.relations import close as same
from meshwright.units import counted, join_words

LOST = "lost on their way back: the all-to-all of the combine, or its row counts"
COMBINE_BACKWARD = "the backward of the combine"
OTHERS = "other ranks' "
NOT_RETURNED = {
    frozenset({f"{OTHERS}weights"}): "the router's gradient comes from each rank's own experts only: gradients of "
    "routing weights are not returned to the tokens' ranks",
    frozenset({f"{OTHERS}rows"}): "gradients of rows are not returned to the tokens' ranks: the backward of the "
    "dispatch's all-to-all",
    frozenset({f"{OTHERS}rows", f"{OTHERS}weights"}): "experts get gradients of their own rank's tokens only: "
    f"{COMBINE_BACKWARD}'s all-to-all",
}
"""Causes, by the parts of a gradient that are lost on the way from other ranks."""
PARTS = {
    "rows": "the experts' rows", "weights": "routing weights", "balance": "the balance loss", "z": "the z-loss",
    "shared gate": "the shared experts' gate", "shared up": "the shared experts' up projection",
}  # fmt: skip
"""What the gradient of a layer's input comes through."""
RIGHT = 1e-7
"""Distance of a fitted factor from 1 up to which it is right."""
Hypothesis = tuple[str, dict[str, Tensor]]
"""A cause, and what replaces steps of the layer's definition then."""


def hypotheses(right: ExpertLayer, *, is_cp: bool) -> Iterator[Hypothesis]:
    """Yield what may be wrong in a layer with experts, simple faults first.

    Args:
        right: the layer as it should be.
        is_cp: whether samples are on several ranks, so that a token's rank is not known.
    """
    yield from _of_combine(right, is_cp=is_cp)
    yield from _of_scores(right)
    yield from _of_slots(right)
    yield from _of_choices(right)
    if not is_cp:
        yield from _of_rows(right)


def _of_combine(right: ExpertLayer, *, is_cp: bool) -> Iterator[Hypothesis]:
    """Yield other sums of the experts' outputs."""
    placement, size, table = right.placement, right.placement.size, right.table
    positions = range(size if size > 1 else 0)
    held = {position: placement.held(position) for position in positions}
    yield "routing weights are applied twice", {"weights": right.weights**2}
    yield "routing weights are not applied", {"weights": right.kept.double()}
    at_input = right.combine(table, at_input=True)
    yield "routing weights are applied to the experts' inputs instead of their outputs", {"routed": at_input}
    yield "rows are dropped at combine", {"table": torch.zeros_like(table)}
    if size > 1 and not is_cp:
        yield f"rows of other ranks are {LOST}", {"table": table * ~right.remote}
        own = right.experts % placement.num_local + right.positions[:, None, None] * placement.num_local
        cause = "the experts' local indices are taken for those on the token's own rank: no row leaves its rank"
        yield cause, {"table": right.table_of(own)}
    for at in positions:
        cause = f"rows from ep rank {at} are {LOST}; no outputs of {placement.describe(held[at])}"
        yield cause, {"table": table * (right.owners != at)}
    for experts in (range(placement.num_experts), *held.values()):
        cause = f"gate and up are exchanged in {placement.describe(experts)}"
        yield cause, {"routed": right.combine(table, exchanged=experts)}
    for cause, other_e in misrouted(placement):
        yield cause, {"table": right.table_of(torch.tensor(other_e)[right.experts])}
    for shift, whose in ((1, "previous"), (-1, "next")):
        cause = f"rows are combined into the wrong tokens: each token gets the outputs of the {whose} one"
        by_cell = right.routed.view(len(right.x_cbtd), -1, right.x.shape[-1])
        yield cause, {"routed": by_cell.roll(shift, 1).view_as(right.x)}
    if size > 1:
        owners_stk = right.owners[right.experts]
        num_there = (owners_stk[..., None] == owners_stk[..., None, :]).sum(-1)
        cause = "a token with several experts on one rank gets their outputs once for each of them"
        yield cause, {"weights": right.weights * num_there}
    for number, word in enumerate(("first", "second")[: right.config.top_k] if right.config.top_k > 1 else ()):
        kept = torch.arange(right.config.top_k) != number
        yield f"tokens get no output of their {word} choice of expert", {"weights": right.weights * kept}


def misrouted(placement: ExpertPlacement) -> Iterator[tuple[str, list[int]]]:
    """Yield causes, and the experts that compute in the place of each."""
    num, local = placement.num_experts, placement.num_local
    for a, b in itertools.combinations(range(placement.size), 2):
        other = {a: b, b: a}
        table = [other.get(e // local, e // local) * local + e % local for e in range(num)]
        yield f"the experts of ep ranks {a} and {b} are swapped", table
    for shift in sorted({1, num - 1, local, num - local}) if num > 1 else ():
        away = f"{shift}" if 2 * shift <= num else f"−{num - shift}"
        yield f"the offset of the experts' indices is wrong by {away}", [(e + shift) % num for e in range(num)]


def _of_scores(right: ExpertLayer) -> Iterator[Hypothesis]:
    """Yield other scores and routing weights."""
    config, bias = right.config, right.router.load.bias
    verb = "are not" if config.normalize else "are"
    cause = f"routing weights {verb} normalised over a token's {config.top_k} experts"
    yield cause, {"weights": right.weighed(normalize=not config.normalize)}
    yield "the routing weights of a token's choices are exchanged", {"weights": right.weights.flip(-1) * right.kept}
    is_softmax = config.score is Score.SOFTMAX
    due, other = ("softmax", "sigmoid") if is_softmax else ("sigmoid", "softmax")
    wrong = {f"scores are the {other} of the router's logits instead of their {due}":
             right.logits.sigmoid() if is_softmax else right.logits.softmax(-1)}  # fmt: skip
    if right.placement.size > 1:
        by_rank = right.logits.view(*right.x.shape[:2], right.placement.size, -1)
        cause = "scores are a softmax over each ep rank's experts instead of over all"
        wrong[cause] = by_rank.softmax(-1).flatten(-2)
    if bias is not None:
        cause = "the balancing bias enters the routing weights; it may only change the choice of experts"
        wrong[cause] = right.scores + bias
    for cause, found in wrong.items():
        yield cause, {"scores": found, "experts": right.experts}
        yield cause, {"scores": found}


def _of_slots(right: ExpertLayer) -> Iterator[Hypothesis]:
    """Yield other choices that find a slot."""
    if (capacity := right.capacity) is None:
        return
    config, experts, size, length = right.config, right.experts, right.placement.size, right.x.shape[1]
    yield "tokens over an expert's capacity are computed instead of dropped", {"kept": torch.ones_like(right.kept)}
    num_samples = right.x_cbtd.shape[1]
    of_cell = right.slots(experts.view(len(right.x_cbtd), -1, config.top_k), num_samples * capacity)
    cause = "capacity is counted over each rank's micro-batch instead of over each sample"
    yield cause, {"kept": of_cell.view_as(experts)}
    order_sc = right.chosen.flatten(1).argsort(-1, descending=True)
    kept_sc = right.slots(experts.flatten(1).gather(1, order_sc)[..., None], capacity)[..., 0]
    best = torch.zeros_like(kept_sc).scatter(1, order_sc, kept_sc).view_as(experts)
    yield "the choices with the lowest scores are dropped, instead of the last tokens'", {"kept": best}
    left = right.chosen * right.kept
    weights = left / left.sum(-1, keepdim=True).clamp_min(1e-300) * config.scale
    yield "routing weights are normalised after choices are dropped instead of before", {"weights": weights}
    divided = replace(config, capacity_factor=(config.capacity_factor or 0.0) / size).capacity(length)
    for slots in sorted(set(range(1, length + 1)) - {capacity}, key=lambda n: (n != divided, abs(n - capacity))):
        why = f", as with a capacity divided by ep ({size})" if size > 1 and slots == divided else ""
        cause = f"an expert has {slots} slots per sample instead of {capacity}{why}"
        yield cause, {"kept": right.slots(experts, slots)}


def _of_choices(right: ExpertLayer) -> Iterator[Hypothesis]:
    """Yield other choices of experts."""
    config, count = right.config, right.num_microbatches
    groups = {1: "best expert", config.num_experts // config.num_groups: "experts' sum"}
    for number, words in groups.items() if config.num_groups > 1 else ():
        cause = f"groups of experts are chosen by their {words} instead of their best two"
        yield cause, {"experts": best_experts(right.router, right.scores, of_group=number)}
    if right.router.load.bias is not None:
        cause = "the balancing bias is updated, but not added to the scores that experts are chosen by"
        yield cause, {"experts": right.scores.topk(config.top_k, -1).indices}
    if count > 1:
        of_microbatch = right.experts.view(-1, count, right.x_cbtd.shape[1], *right.experts.shape[1:])
        before = torch.cat((of_microbatch[:, :1], of_microbatch[:, :-1]), 1).view_as(right.experts)
        yield "stale routing: a micro-batch uses the chosen experts of the one before it", {"experts": before}


def _last_of_each(expert_r: Tensor, weight_r: Tensor) -> tuple[Tensor, Tensor]:
    is_last = torch.cat((expert_r[1:] != expert_r[:-1], torch.tensor([True])))
    return expert_r, weight_r * ~is_last


def _last(expert_r: Tensor, weight_r: Tensor) -> tuple[Tensor, Tensor]:
    return expert_r, weight_r * (torch.arange(len(weight_r)) < len(weight_r) - 1)


def _reversed_groups(expert_r: Tensor, weight_r: Tensor) -> tuple[Tensor, Tensor]:
    experts, sizes = torch.unique(expert_r, return_counts=True)
    return experts.repeat_interleave(sizes.flip(0)), weight_r


ROWS: dict[str, RowChange] = {
    "the last row of each expert is missing{}: offsets of the groups of rows are off by one": _last_of_each,
    "the last row is missing{}: the end of the rows is off by one": _last,
    "each row has the routing weight of the row before it{}": lambda expert_r, weight_r: (expert_r, weight_r.roll(1)),
    "each row has the routing weight of the row after it{}": lambda expert_r, weight_r: (expert_r, weight_r.roll(-1)),
    "the groups of rows are given to the experts in reverse order{}": _reversed_groups,
}
"""Faults in the rows of a rank, which are ordered by expert."""


def _of_rows(right: ExpertLayer) -> Iterator[Hypothesis]:
    """Change the rows of all ranks' experts, or of one's."""
    size = right.placement.size
    where = {" on each ep rank": range(size), **{f" on ep rank {at}": range(at, at + 1) for at in range(size)}}
    for on, positions in where.items() if size > 1 else [("", range(1))]:
        for words, change in ROWS.items():
            yield words.format(on), {"table": right.with_rows(change, positions)}


@dataclass(frozen=True)
class ExpertParts:
    """Explains a difference in a layer with experts."""

    first: FirstDifference
    trace: Trace
    placement: ExpertPlacement
    counts: LayoutCounts

    def explain(self) -> str | None:
        """Return the cause, or None if it is not recognised."""
        explain = {"output": self._forward, f"{GRADIENT}input": self._backward}.get(self.first.what)
        is_layer = isinstance(self.trace.module(self.name), MixtureOfExperts)
        return explain() if is_layer and explain is not None else None

    @property
    def name(self) -> str:
        """Name of the layer."""
        return self.first.module

    @cached_property
    def layer(self) -> ExpertLayer:
        """The layer as it should be."""
        module = self.trace.module(self.name)
        assert isinstance(module, MixtureOfExperts), "others are not explained"
        x_cbtd = torch.from_numpy(np.stack([values[f"input of {self.name}"] for values in self.trace.reference]))
        return ExpertLayer(module, x_cbtd, self.placement, self.trace.num_microbatches)

    def _at(self, found: Tensor, value: LocalValue) -> np.ndarray:
        """Return a rank's shard of a value [s, t, d] that is computed here."""
        return take(found.detach().view_as(self.layer.x_cbtd)[value.cell].numpy(), value.index)

    @torch.no_grad()
    def _forward(self) -> str | None:
        for cause, other in hypotheses(self.layer, is_cp=self.trace.axes.cp > 1):
            out = self.layer.but(**other).out
            if all(same(value.observed, self._at(out, value)) for value in self.first.wrong):
                return cause
        factors = self._fit({"routed": self.layer.routed, "shared": self.layer.shared}) or {}
        return self._factor_words(*factors.popitem()) if len(factors) == 1 else self._other_weights()

    def _factor_words(self, part: str, factor: float) -> str | None:
        """Tell a factor of the routed or the shared experts' part; None if it is one of the whole output."""
        if part == "shared" and factor == 0.0:
            return "shared experts are left out"
        scale, causes = self.layer.config.scale, []
        if scale != 1.0 and close(factor, scale):
            twice = "is applied twice" if part == "routed" else "is applied to it too"
            causes.append(f"the router's scale ({scale:g}) {twice}")
        if part == "routed" and scale != 1.0 and close(factor, 1 / scale):
            causes.append(f"the router's scale ({scale:g}) is not applied")
        if not causes and self.layer.module.shared is None:
            return None
        causes += [known] if (known := factor_cause(factor, self.counts, max_rarity=2)) else []
        why = ", or ".join(causes) or NOTHING_FITS
        return f"the part of the {part} experts is {number_words(factor)} × the right one: {why}"

    def _fit(self, parts: Mapping[str, Tensor]) -> dict[str, float] | None:
        """Return the factors other than 1 of parts whose sum is the right value; None if others don't explain it."""
        wrong = self.first.wrong
        columns = {
            name: np.concatenate([self._at(part, value).ravel() for value in wrong]) for name, part in parts.items()
        }
        columns = {name: column for name, column in columns.items() if np.abs(column).max(initial=0.0) > 1e-12}
        off = np.concatenate([(value.observed - value.expected).ravel() for value in wrong])
        if not columns:
            return None
        matrix = np.stack(list(columns.values()), -1)
        norms = np.linalg.norm(matrix, axis=0)
        change = np.linalg.lstsq(matrix / norms, off, rcond=None)[0] / norms
        if not same(off, matrix @ change):
            return None
        factors = dict(zip(columns, (1.0 + change).tolist(), strict=True))
        return {name: round(factor, 9) + 0.0 for name, factor in factors.items() if abs(factor - 1.0) > RIGHT}

    def _other_weights(self) -> str | None:
        """Solve for the routing weights, if each token's output is a sum of its experts' outputs."""
        layer, num, wrong, others, subset = self.layer, self.placement.num_experts, 0, 0, True
        for value in self.first.wrong:
            x_nd = torch.from_numpy(self._at(layer.x, value)).flatten(0, 1)
            if x_nd.shape[1] <= num or value.observed.shape[-1] != x_nd.shape[1]:
                return None
            outs_nde = torch.stack([one_expert(layer.module, expert, x_nd) for expert in range(num)], -1)
            out_nd = torch.from_numpy(value.observed - self._at(layer.shared, value)).flatten(0, 1)
            found_ne = torch.linalg.lstsq(outs_nde, out_nd[..., None]).solution[..., 0]
            if not same(out_nd.numpy(), (outs_nde @ found_ne[..., None])[..., 0].numpy()):
                return None
            table_bte = layer.table.view(*layer.x_cbtd.shape[:3], num)[value.cell].numpy()
            due_ne = torch.from_numpy(take(table_bte, value.index[:2])).flatten(0, 1)
            least = RIGHT * due_ne.abs().max()
            found_ne = torch.where(found_ne.abs() < least, 0.0, found_ne)
            is_other = (found_ne - due_ne).abs() > least
            wrong += int(is_other.any(-1).sum())
            others += int(((found_ne != 0) & (due_ne == 0)).any(-1).sum())
            subset &= not found_ne[is_other].any()
        if subset:
            return f"{counted(wrong, 'token')} get no output of some of their experts; other outputs are right"
        weights = f"{counted(wrong - others, 'token')} get other routing weights for their experts"
        found = [weights] if wrong > others else []
        found += [f"{counted(others, 'token')} get experts that are not theirs"] if others else []
        return (
            f"{', and '.join(found)}: the output is a sum of experts' outputs, but not the one the router is to choose"
        )

    # ---- backward

    def _backward(self) -> str | None:
        name = f"{GRADIENT}output of {self.name}"
        if any(name not in values for values in self.trace.reference):
            return None
        gradient = torch.from_numpy(np.concatenate([values[name] for values in self.trace.reference]))
        parts = self._gradients(gradient)
        factors = self._fit(parts)
        return (self._part_words(factors, parts) if factors else None) or self._losses()

    def _gradients(self, gradient: Tensor) -> dict[str, Tensor]:
        """Return the parts of the gradient of a layer's input."""
        xs = {name: self.layer.x.clone().requires_grad_() for name in INPUTS}
        run, found = self.layer.but(**xs), dict[str, Tensor]()
        shares = {"": torch.tensor(1.0)}
        if self.placement.size > 1 and self.trace.axes.cp == 1:
            shares = {OTHERS: self.layer.remote, "": ~self.layer.remote}
        for whose, share in shares.items():
            inputs, out = (xs["rows_x"], xs["router_x"]), run.combine(run.table * share)
            rows, weights = torch.autograd.grad(out, inputs, gradient, retain_graph=True)
            found |= {f"{whose}rows": rows, f"{whose}weights": weights}
        if self.layer.module.shared is not None:
            gate, up = torch.autograd.grad(run.shared, (xs["gate_x"], xs["up_x"]), gradient)
            found |= {"shared gate": gate, "shared up": up}
        losses = (self.layer.router.balance_loss, self.layer.router.z_loss)
        return found | {one.name: self.layer.loss_gradient(one) for one in losses if one is not None}

    def _part_words(self, factors: Mapping[str, float], parts: Iterable[str]) -> str | None:
        """Tell the parts of the gradient that are lost, or scaled."""
        changed, cp, router = set(factors), self.trace.axes.cp, f"{self.name}.router"
        losses = [loss for loss in ("balance", "z") if loss in changed]
        own_means = {"balance": float(cp * cp), "z": float(cp)}
        if changed == set(losses):
            if cp > 1 and "balance" in losses and all(close(factors[one], own_means[one]) for one in losses):
                times = " and ".join(number_words(factors[one]) for one in losses)
                what = f"the {' and '.join(losses)} loss{'es' if len(losses) > 1 else ''} of {router}"
                return f"{what} have {times} × their weight: means are over each cp rank's own tokens, not the sample's"
            return "; ".join(self._weight_words(f"the {one} loss of {router}", factors[one]) for one in losses)
        if any(factors.values()):
            return None
        if words := NOT_RETURNED.get(frozenset(changed)):
            return words
        lost = [PARTS[part] for part in parts if part in changed and part in PARTS]
        is_all = all(part in changed for part in parts if part.removeprefix(OTHERS) in changed)
        return f"no gradient reaches the layer's input through {join_words(lost)}" if is_all else None

    def _weight_words(self, what: str, factor: float) -> str:
        if factor == 0.0:
            return f"{what} is missing: its scale is 0, or it is not added there"
        known, ep = factor_cause(factor, self.counts, max_rarity=2), self.placement.size
        causes = [known] if known else []
        for verb, size in (("multiplied", ep), ("divided", 1.0 / ep)):
            if ep > 1 and close(factor, size):
                causes.append(f"{verb} by ep ({ep} ranks), whose ranks have different tokens")
        why = ", or ".join(causes) or factor_cause(factor, self.counts) or NOTHING_FITS
        return f"{what} has {number_words(factor)} × its weight: {why}"

    def _losses(self) -> str | None:
        """Recognise an auxiliary loss of other values, such as another load that a balance loss counts."""
        layer, balance, z = self.layer, self.layer.router.balance_loss, self.layer.router.z_loss
        tried: list[tuple[str, AuxiliaryLoss, Callable[[], Tensor]]] = []
        if balance is not None:
            for words, counts_ste in self._other_counts():
                gradient = partial(layer.loss_gradient, balance, counts_ste)
                tried.append((f"the balance loss counts {words}", balance, gradient))
            words = "the balance loss takes scores that are not divided by their sum"
            tried.append((words, balance, partial(layer.loss_gradient, balance, divided=False)))
        if z is not None:
            gradient = partial(layer.loss_gradient, z, change=lambda x: x - x.amax(-1, keepdim=True).detach())
            tried.append(("the z-loss takes logits from which their maximum is subtracted", z, gradient))
        for words, handle, other in tried:
            off = other() - layer.loss_gradient(handle)
            if all(same(value.observed - value.expected, self._at(off, value)) for value in self.first.wrong):
                return words
        return None

    def _other_counts(self) -> Iterator[tuple[str, Tensor]]:
        layer, (num_cells, num_samples, length) = self.layer, self.layer.x_cbtd.shape[:3]
        due = "the global batch's" if layer.config.over_batch else "each sample's"
        chosen_ste, cp = layer.one_hot(), self.trace.axes.cp
        of_sample = chosen_ste.sum(1, keepdim=True)
        of_cell = of_sample.view(num_cells, num_samples, 1, -1).mean(1).repeat_interleave(num_samples, 0)
        yield f"the load of each rank's micro-batch instead of {due}", of_cell
        yield f"the load of each sample instead of {due}", of_sample
        axes, dp_rank = self.trace.axes, torch.arange(num_cells) // self.trace.num_microbatches
        for axis, at in (("dp_replicate", dp_rank // axes.dp_shard), ("dp_shard", dp_rank % axes.dp_shard)):
            if axes.size(axis) > 1 and axes.data_parallel() > axes.size(axis):
                cells = of_sample.view(num_cells, num_samples, 1, -1).mean(1)
                groups = torch.stack([cells[at == one].mean(0) for one in at])
                yield f"a load that is not summed over {axis}", groups.repeat_interleave(num_samples, 0)
        kept = layer.one_hot(kept_only=True).sum(1, keepdim=True)
        yield "only the choices that find a slot, and not those that are dropped", kept
        ranks = [self.trace.context_places(cell, num_samples, length)[0] for cell in range(num_cells)]
        rank_st = torch.from_numpy(np.concatenate(ranks))
        same_rank_stt = (rank_st[:, :, None] == rank_st[:, None, :]).double()
        cause = "the tokens of each cp rank, times cp, instead of the sample's: counts are not summed over cp"
        yield cause, cp * same_rank_stt @ chosen_ste
