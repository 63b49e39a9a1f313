"""Explain a layer with experts whose input is right: run it once more on the recorded input, expert by expert, with
other choices, weights and gradients, and its auxiliary losses by themselves.

Shapes: b samples, t tokens, n = b · t, k experts per token, e experts, d model width, c = t · k choices, r rows.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.nn.experts.layer import MixtureOfExperts
from meshwright.nn.experts.router import balance_loss, sample_counts, z_loss
from meshwright.nn.experts.router_config import Score
from meshwright.nn.step_handles import AuxiliaryLoss, auxiliary_losses
from meshwright.prove.judge.counts import NOTHING_FITS, LayoutCounts, close, factor_cause
from meshwright.prove.judge.judge import Sides
from meshwright.prove.judge.tensors import Array, to_arrays
from meshwright.prove.placement import ExpertPlacement
from meshwright.prove.record.definitions import best_experts, one_expert, scores
from meshwright.prove.result import number_words
from meshwright.prove.trace.expert_layer import (
    INPUTS,
    ROWS,
    Cell,
    Run,
    after_drops,
    biased,
    by_moving_bias,
    by_score,
    combined,
    of_local,
    of_microbatch,
    on_own_rank,
    once_each,
    other_score,
    previous,
    rows_of,
    sending,
)  # fmt: skip
from meshwright.prove.trace.first_difference import FirstDifference, LocalValue, Trace, take
from meshwright.prove.trace.probe import GRADIENT, ReferenceTrace
from meshwright.prove.trace.relations import close as same
from meshwright.units import counted

ORDINALS = ("first", "second")
LOST = "lost on their way back: the all-to-all of the combine, or its row counts"
COMBINE_BACKWARD = "the backward of the combine"
FLOAT32 = 1e-6
"""Relative difference of what foreign routers compute in float32."""
RIGHT = 1e-7
"""Distance of a fitted factor from 1 up to which it is right."""


Hypothesis = tuple[str, Run]


@dataclass(frozen=True)
class ExpertParts:
    """Explains a difference in a layer with experts."""

    first: FirstDifference
    trace: Trace
    placement: ExpertPlacement
    counts: LayoutCounts

    def explain(self) -> str | None:
        """Return the cause, or None if it is not recognised."""
        what, name = self.first.name.removeprefix(GRADIENT).split(" of ", 1)
        source = self.trace.source
        layer = None if source is None else dict(source.plain.module.named_modules()).get(name)
        if not isinstance(layer, MixtureOfExperts):
            return None
        if self.first.name.startswith(GRADIENT):
            return self._backward(layer, name) if what == "input" else None
        return self._forward(layer, name) if what == "output" else None

    def _cells(self, layer: MixtureOfExperts, name: str) -> dict[int, Cell]:
        return {cell: self._cell(layer, name, cell) for cell in sorted({value.cell for value in self.first.wrong})}

    def _cell(self, layer: MixtureOfExperts, name: str, cell: int) -> Cell:
        dp_rank, microbatch = divmod(cell, self.trace.num_microbatches)
        inputs = [
            torch.from_numpy(self.trace.reference[at][f"input of {name}"]) for at in range(cell - microbatch, cell + 1)
        ]
        return Cell(layer, inputs[-1], dp_rank, self.placement, tuple(inputs[:-1]))

    @torch.no_grad()
    def _forward(self, layer: MixtureOfExperts, name: str) -> str | None:
        cells = self._cells(layer, name)
        for cause, how in self._hypotheses(layer, next(iter(cells.values()))):
            if self._agree({cell: one.run(how).numpy() for cell, one in cells.items()}):
                return cause
        if (factors := self._factors(cells)) is not None:
            return factors or None
        return self._wrong_rows(layer, name, cells) or self._other_weights(cells)

    def _agree(self, outputs: dict[int, np.ndarray]) -> bool:
        return all(same(value.observed, take(outputs[value.cell], value.index)) for value in self.first.wrong)

    def _hypotheses(self, layer: MixtureOfExperts, one: Cell) -> Iterator[Hypothesis]:
        size, top_k = self.placement.size, layer.router.config.top_k
        yield "routing weights are applied twice", Run(weigh=lambda one, c: one.weights(c) ** 2)
        yield "routing weights are not applied", Run(weigh=lambda one, c: c.kept_btk.double())
        yield "routing weights are applied to the experts' inputs instead of their outputs", Run(at_input=True)
        yield "rows are dropped at combine", Run(drop=lambda one: torch.ones_like(one.remote_ne()))
        if size > 1 and self.trace.axes.cp == 1:
            yield f"rows of other ranks are {LOST}", Run(drop=Cell.remote_ne)
            cause = "the experts' local indices are taken for those on the token's own rank: no row leaves its rank"
            yield cause, Run(send=on_own_rank)
        for position in range(size if size > 1 else 0):
            held = self._held(position)
            cause = f"rows from ep rank {position} are {LOST}; no outputs of {self.placement.describe(held)}"
            yield cause, Run(drop=lambda one, at=position: one.on_rank_ne(at))  # type: ignore[misc]
        for position in range(-1, size) if size > 1 else (-1,):
            held = range(self.placement.num_experts) if position < 0 else self._held(position)
            cause = f"gate and up are exchanged in {self.placement.describe(held)}"
            yield cause, Run(exchanged=held)
        yield from self._misrouted()
        for shift, whose in ((1, "previous"), (-1, "next")):
            cause = f"rows are combined into the wrong tokens: each token gets the outputs of the {whose} one"
            yield cause, Run(shift=shift)
        if size > 1:
            cause = "a token with several experts on one rank gets their outputs once for each of them"
            yield cause, Run(weigh=once_each)
        for number in range(top_k):
            lost = torch.arange(top_k) != number
            cause = f"tokens get no output of their {ORDINALS[number]} choice of expert" if number < 2 else ""
            if cause and top_k > 1:
                yield cause, Run(weigh=lambda one, c, left=lost: one.weights(c) * left)  # type: ignore[misc]
        yield from self._routed(layer, one)

    def _routed(self, layer: MixtureOfExperts, one: Cell) -> Iterator[Hypothesis]:
        """Yield other scores, choices and routing weights."""
        config, router = layer.router.config, layer.router
        toggled = Run(weigh=lambda one, c: one.weights(c, other=True))
        verb = "are not" if config.normalize else "are"
        yield f"routing weights {verb} normalised over a token's {config.top_k} experts", toggled
        yield (
            "the routing weights of a token's choices are exchanged",
            Run(weigh=lambda one, c: one.weights(c).flip(-1) * c.kept_btk),
        )
        right = lambda one, _: one.right_experts()  # noqa: E731
        due, other = ("softmax", "sigmoid") if config.score is Score.SOFTMAX else ("sigmoid", "softmax")
        for choose in (right, Run.choose):
            yield f"scores are the {other} of the router's logits instead of their {due}", Run(other_score, choose)
            if self.placement.size > 1:
                yield "scores are a softmax over each ep rank's experts instead of over all", Run(of_local, choose)
        if (capacity := config.capacity(one.x_btd.shape[1])) is not None:
            yield from self._dropped(one, capacity)
        if config.num_groups > 1:
            groups = config.num_experts // config.num_groups
            for number, words in ((1, "best expert"), (groups, "experts' sum")):
                yield (
                    f"groups of experts are chosen by their {words} instead of their best two",
                    Run(choose=lambda one, s, n=number: best_experts(one.layer.router, s, of_group=n)),  # type: ignore[misc]
                )
        if router.load.bias is not None:
            cause = "the balancing bias enters the routing weights; it may only change the choice of experts"
            for choose in (right, Run.choose):
                yield cause, Run(biased, choose)
            yield (
                "the balancing bias is updated, but not added to the scores that experts are chosen by",
                Run(choose=lambda one, s: s.topk(config.top_k, -1).indices),
            )
            if self.trace.axes.cp == 1:
                cause = "the balancing bias changes after each micro-batch, by its own counts, and not once per step"
                yield cause, Run(choose=by_moving_bias)
        if self.trace.num_microbatches > 1:
            yield "stale routing: a micro-batch uses the chosen experts of the one before it", Run(choose=previous)

    def _dropped(self, one: Cell, capacity: int) -> Iterator[Hypothesis]:
        """Yield other choices that find a slot."""
        config, length, size = one.layer.router.config, one.x_btd.shape[1], self.placement.size
        cause = "tokens over an expert's capacity are computed instead of dropped"
        yield cause, Run(keep=lambda one, e, _: torch.ones_like(e, dtype=torch.bool))
        cause = "capacity is counted over each rank's micro-batch instead of over each sample"
        yield cause, Run(keep=of_microbatch)
        yield "the choices with the lowest scores are dropped, instead of the last tokens'", Run(keep=by_score)
        yield "routing weights are normalised after choices are dropped instead of before", Run(weigh=after_drops)
        divided = replace(config, capacity_factor=(config.capacity_factor or 0.0) / size).capacity(length)
        for slots in sorted(set(range(1, length + 1)) - {capacity}, key=lambda n: (n != divided, abs(n - capacity))):
            why = f", as with a capacity divided by ep ({size})" if size > 1 and slots == divided else ""
            cause = f"an expert has {slots} slots per sample instead of {capacity}{why}"
            yield cause, Run(keep=lambda one, e, _, n=slots: one.kept(e, n))  # type: ignore[misc]

    def _held(self, position: int) -> range:
        return range(position * self.placement.num_local, (position + 1) * self.placement.num_local)

    def _misrouted(self) -> Iterator[Hypothesis]:
        num, local = self.placement.num_experts, self.placement.num_local
        for a, b in itertools.combinations(range(self.placement.size), 2):
            other = {a: b, b: a}
            table = [other.get(e // local, e // local) * local + e % local for e in range(num)]
            yield f"the experts of ep ranks {a} and {b} are swapped", sending(table)
        for shift in sorted({1, num - 1, local, num - local}) if num > 1 else ():
            away = f"{shift}" if 2 * shift <= num else f"−{num - shift}"
            cause = f"the offset of the experts' indices is wrong by {away}"
            yield cause, sending([(e + shift) % num for e in range(num)])

    def _factors(self, cells: dict[int, Cell]) -> str | None:
        """Fit factors of the routed and shared experts' parts; empty if it is one of the whole output."""
        one = next(iter(cells.values()))
        routed = {cell: each.run(Run(shared=0.0)).numpy() for cell, each in cells.items()}
        both = {cell: each.run(Run()).numpy() for cell, each in cells.items()}
        parts = {"routed": routed}
        if one.layer.shared is not None:
            parts["shared"] = {cell: both[cell] - routed[cell] for cell in cells}
        found = self._fit(parts)
        if found is None or len(found) != 1:
            return None
        ((part, factor),) = found.items()
        if part == "shared" and factor == 0.0:
            return "shared experts are left out"
        scale, causes = one.layer.router.config.scale, []
        if scale != 1.0 and close(factor, scale):
            twice = "is applied twice" if part == "routed" else "is applied to it too"
            causes.append(f"the router's scale ({scale:g}) {twice}")
        if part == "routed" and scale != 1.0 and close(factor, 1 / scale):
            causes.append(f"the router's scale ({scale:g}) is not applied")
        known = factor_cause(factor, self.counts, max_rarity=2)
        if not causes and one.layer.shared is None:
            return ""
        causes += [known] if known else []
        why = ", or ".join(causes) or NOTHING_FITS
        return f"the part of the {part} experts is {number_words(factor)} × the right one: {why}"

    def _fit(self, parts: Mapping[str, Mapping[int, Array]]) -> dict[str, float] | None:
        """Return the factors other than 1 of parts whose sum is the right value; None if others don't explain it."""
        columns = {
            name: np.concatenate([take(part[value.cell], value.index).reshape(-1) for value in self.first.wrong])
            for name, part in parts.items()
        }
        columns = {name: column for name, column in columns.items() if np.abs(column).max(initial=0.0) > 1e-12}
        off = np.concatenate([(value.observed - value.expected).reshape(-1) for value in self.first.wrong])
        if not columns:
            return None
        norms = [float(np.linalg.norm(column)) for column in columns.values()]
        matrix = np.stack([column / norm for column, norm in zip(columns.values(), norms, strict=True)], -1)
        change = np.linalg.lstsq(matrix, off, rcond=None)[0]
        if not same(off, matrix @ change):
            return None
        factors = {name: 1.0 + float(c) / norm for name, c, norm in zip(columns, change, norms, strict=True)}
        return {name: round(factor, 9) + 0.0 for name, factor in factors.items() if abs(factor - 1.0) > RIGHT}

    def _wrong_rows(self, layer: MixtureOfExperts, name: str, cells: dict[int, Cell]) -> str | None:
        """Change the rows of all ranks' experts, or of one's."""
        size, count = self.placement.size, self.trace.num_microbatches
        if self.trace.axes.cp > 1:
            return None
        groups = {(cell // count // size, cell % count) for cell in cells}
        layers = {(g, m): [self._cell(layer, name, (g * size + q) * count + m) for q in range(size)] for g, m in groups}
        rows = {at: [rows_of(group, position) for position in range(size)] for at, group in layers.items()}
        for where in (tuple(range(size)), *((position,) for position in range(size) if size > 1)):
            on = f" on ep rank {where[0]}" if len(where) < size else (" on each ep rank" if size > 1 else "")
            for words, change in ROWS:
                outputs = {}
                for (g, m), group in layers.items():
                    changed = [change(r) if at in where else r for at, r in enumerate(rows[g, m])]
                    for q, out in enumerate(combined(group, rows[g, m], changed)):
                        outputs[(g * size + q) * count + m] = out
                if self._agree(outputs):
                    return words.format(on)
        return None

    def _other_weights(self, cells: dict[int, Cell]) -> str | None:
        """Solve for the routing weights, if each token's output is a sum of its experts' outputs."""
        num, wrong, others, subset = self.placement.num_experts, 0, 0, True
        for value in self.first.wrong:
            one = cells[value.cell]
            if one.x_btd.shape[-1] <= num or value.observed.shape[-1] != one.x_btd.shape[-1]:
                return None
            x_nd, tokens = one.x_btd.flatten(0, 1), _flat(value)
            outs_end = torch.stack([one_expert(one.layer, expert, x_nd) for expert in range(num)])[:, tokens].numpy()
            due_ne = one.weights_ne(Run())[tokens].numpy()
            shared = 0.0 if one.layer.shared is None else one.layer.shared(one.x_btd).flatten(0, 1)[tokens].numpy()
            observed_nd = value.observed.reshape(-1, value.observed.shape[-1])
            for at, out_d in enumerate(observed_nd - shared):
                found_e = np.linalg.lstsq(outs_end[:, at].T, out_d, rcond=None)[0]
                if not same(out_d, outs_end[:, at].T @ found_e):
                    return None
                found_e[np.abs(found_e) < RIGHT * np.abs(due_ne).max()] = 0.0
                is_other = np.abs(found_e - due_ne[at]) > RIGHT * np.abs(due_ne).max()
                wrong += int(is_other.any())
                others += int(((found_e != 0) & (due_ne[at] == 0)).any())
                subset &= not found_e[is_other].any()
        if subset:
            return f"{counted(wrong, 'token')} get no output of some of their experts; other outputs are right"
        weights = f"{counted(wrong - others, 'token')} get other routing weights for their experts"
        found = [weights] if wrong > others else []
        found += [f"{counted(others, 'token')} get experts that are not theirs"] if others else []
        return (
            f"{', and '.join(found)}: the output is a sum of experts' outputs, but not the one the router is to choose"
        )

    def _backward(self, layer: MixtureOfExperts, name: str) -> str | None:
        cells = self._cells(layer, name)
        found: dict[str, dict[int, Array]] = defaultdict(dict)
        for cell, one in cells.items():
            gradient = self.trace.reference[cell].get(f"{GRADIENT}output of {name}")
            if gradient is None:
                return None
            for part, value in self._gradients(one, torch.from_numpy(gradient)):
                found[part][cell] = value.numpy()
        if set(found) and all(len(of) == len(cells) for of in found.values()):
            factors = self._fit(found)
            if factors and (cause := self._part_words(factors, name, set(found))):
                return cause
        return self._loads(layer, cells)

    def _gradients(self, one: Cell, gradient: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the parts of the gradient of a layer's input."""
        router = one.layer.router

        def parts(how: Run) -> tuple[Tensor, ...]:
            xs = [one.x_btd.clone().requires_grad_() for _ in INPUTS]
            grads = torch.autograd.grad(one.run(how, *xs), xs, gradient, allow_unused=True)
            return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(xs, grads, strict=True))

        rows, weights, gate, up = parts(Run())
        if self.placement.size > 1 and self.trace.axes.cp == 1:
            own_rows, own_weights, *_ = parts(Run(lose=("rows", "weights")))
            yield from (("other ranks' rows", rows - own_rows), ("other ranks' weights", weights - own_weights))
            rows, weights = own_rows, own_weights
        yield from (("rows", rows), ("weights", weights), ("shared gate", gate), ("shared up", up))
        for handle in (router.balance_loss, router.z_loss):
            if handle is not None:
                yield handle.name, torch.from_numpy(_auxiliary_gradient(one, handle, None))

    def _part_words(self, factors: Mapping[str, float], name: str, parts: set[str]) -> str | None:
        changed, cp = set(factors), self.trace.axes.cp
        losses = [loss for loss in ("balance", "z") if loss in changed]
        own_means = {"balance": float(cp * cp), "z": float(cp)}
        if changed == set(losses):
            if cp > 1 and "balance" in losses and all(close(factors[one], own_means[one]) for one in losses):
                times = " and ".join(number_words(factors[one]) for one in losses)
                what = f"the {' and '.join(losses)} loss{'es' if len(losses) > 1 else ''} of {name}.router"
                return f"{what} have {times} × their weight: means are over each cp rank's own tokens, not the sample's"
            return "; ".join(self._weight_words(f"the {one} loss of {name}.router", factors[one]) for one in losses)
        if any(factors.values()):
            return None
        rows, weights = ({f"other ranks' {what}"} for what in ("rows", "weights"))
        router = {*weights, "weights", "balance", "z"} & parts
        remote = "gradients of {} are not returned to the tokens' ranks: the backward of the dispatch's all-to-all"
        own = "the router's gradient comes from each rank's own experts only: gradients of routing weights are not "
        for which, cause in (
            (weights, own + "returned to the tokens' ranks"),
            (rows, remote.format("rows")),
            (rows | weights, f"experts get gradients of their own rank's tokens only: {COMBINE_BACKWARD}'s all-to-all"),
            (rows | {"rows"}, "no gradient reaches the layer's input through the experts' rows"),
            (router, "no gradient reaches the layer's input through the router: of routing weights, or of its gate"),
            (
                {*weights, "weights"},
                "no gradient reaches the layer's input through routing weights, only through losses",
            ),
            ({"shared gate", "shared up"}, "no gradient reaches the layer's input through the shared experts"),
            ({"shared gate"}, "no gradient reaches the layer's input through the shared experts' gate"),
            ({"shared up"}, "no gradient reaches the layer's input through the shared experts' up projection"),
        ):
            if changed == which & parts:
                return cause
        return None

    def _loads(self, layer: MixtureOfExperts, cells: dict[int, Cell]) -> str | None:
        """Recognise another load that a balance loss counts."""
        handle = layer.router.balance_loss
        if handle is None:
            return None
        due = "the global batch's" if layer.router.config.over_batch else "each sample's"
        causes = {
            "micro-batch": f"the load of each rank's micro-batch instead of {due}",
            "sample": f"the load of each sample instead of {due}",
            "kept": "only the choices that find a slot, and not those that are dropped",
            "cp": "the tokens of each cp rank, times cp, instead of the sample's: counts are not summed over cp",
        }
        for count, words in causes.items():
            if all(self._counts(cells[value.cell], value, handle, count) for value in self.first.wrong):
                return f"the balance loss counts {words}"
        return None

    def _counts(self, one: Cell, value: LocalValue, handle: AuxiliaryLoss, count: str) -> bool:
        experts_btk, num = one.right_experts(), one.placement.num_experts
        counted_bt = torch.ones(experts_btk.shape[:2], dtype=torch.bool)
        if count == "cp":
            counted_bt = torch.zeros_like(counted_bt).flatten().index_fill(0, torch.from_numpy(_flat(value)), True)
            counted_bt = counted_bt.view(experts_btk.shape[:2])
        kept_btk = one.kept(experts_btk) if count == "kept" else torch.ones_like(experts_btk, dtype=torch.bool)
        counts_be = sample_counts(torch.where(kept_btk & counted_bt[..., None], experts_btk, num), num + 1)[
            :, :num
        ].double()
        counts_be = counts_be * (self.trace.axes.cp if count == "cp" else 1)
        counts_be = counts_be.mean(0, keepdim=True).expand_as(counts_be) if count == "micro-batch" else counts_be
        found = _auxiliary_gradient(one, handle, counts_be) - _auxiliary_gradient(one, handle, None)
        return same(value.observed - value.expected, take(found, value.index))

    def _weight_words(self, what: str, factor: float) -> str:
        factor = round(factor, 9)
        if factor == 0.0:
            return f"{what} is missing: its scale is 0, or it is not added there"
        known = factor_cause(factor, self.counts, max_rarity=2)
        causes, ep = [known] if known else [], self.placement.size
        if ep > 1 and close(factor, ep):
            causes.append(f"multiplied by ep ({ep} ranks), whose ranks have different tokens")
        elif ep > 1 and close(factor, 1.0 / ep):
            causes.append(f"divided by ep ({ep} ranks), whose ranks have different tokens")
        why = ", or ".join(causes) or factor_cause(factor, self.counts) or NOTHING_FITS
        return f"{what} has {number_words(factor)} × its weight: {why}"


def _flat(value: LocalValue) -> np.ndarray:
    """Return the number of each of a shard's tokens in the micro-batch."""
    rows, tokens = value.index[0], value.index[1]
    places = np.broadcast_to(tokens, (len(rows), tokens.shape[-1]))
    return np.asarray((rows[:, None] * value.full.shape[1] + places).reshape(-1))


def _auxiliary_gradient(one: Cell, handle: AuxiliaryLoss, counts_be: Tensor | None) -> Array:
    """Return the gradient of a layer's input from one auxiliary loss, with other counts if they are given."""
    router, x = one.layer.router, one.x_btd.clone().requires_grad_()
    logits_bte = router.gate(x)
    if handle is router.z_loss:
        loss = z_loss(logits_bte)
    else:
        _, probabilities_bte = scores(router, logits_bte)
        if counts_be is None:
            counts_be = _right_counts(one)
        loss = balance_loss(counts_be, probabilities_bte, top_k=router.config.top_k)
    (found,) = torch.autograd.grad(loss * handle.weight * handle.scale, x)
    gradient: Array = to_arrays({"": found})[""]
    return gradient


def _right_counts(one: Cell) -> Tensor:
    """Return the counts that the balance loss is due, [b, e]."""
    router = one.layer.router
    with torch.no_grad():
        experts_btk = one.right_experts()
        counts_be = sample_counts(experts_btk, one.placement.num_experts)
        if not router.config.over_batch:
            return counts_be
        total_e = router.batch_counts.reduce(counts_be.sum(0))
        num_samples = total_e.sum() / (experts_btk.shape[1] * experts_btk.shape[2])
        return (total_e / num_samples).expand_as(counts_be.double())


def foreign_experts(first: FirstDifference, trace: Trace) -> str | None:
    """Return what is wrong in experts of transformers, which take tokens, choices and routing weights."""
    what, _, name = first.name.partition(" of ")
    named = {} if trace.source is None else dict(trace.source.plain.module.named_modules())
    gate, experts = getattr(named.get(f"{name.rpartition('.')[0]}.gate"), "weight", None), named.get(name)
    if what != "output" or not isinstance(gate, Tensor) or experts is None or not name.endswith(".experts"):
        return None
    found: list[set[str]] = [_of_tokens(value, trace, name, gate) for value in first.wrong]
    if causes := set.intersection(*found):
        return min(causes)
    return _of_first_experts(first, trace, experts, name, len(gate))


def _of_tokens(value: LocalValue, trace: Trace, name: str, gate_ed: Tensor) -> set[str]:
    """Explain a factor of each token by the sum of its best probabilities."""
    a_nd, b_nd = value.observed, value.expected
    x_nd = torch.from_numpy(trace.reference[value.cell][f"input of {name}"])
    factor_n = (a_nd * b_nd).sum(-1) / np.maximum((b_nd * b_nd).sum(-1), 1e-300)
    if a_nd.ndim != 2 or a_nd.shape != x_nd.shape or not same(a_nd, factor_n[:, None] * b_nd):
        return set()
    with torch.no_grad():
        best_ne = (x_nd @ gate_ed.to(x_nd.dtype).T).softmax(-1).sort(-1, descending=True).values.cumsum(-1).numpy()
    words = "routing weights are {}normalised over a token's {} experts"
    found = {words.format("not ", k + 1) for k in range(1, len(gate_ed)) if same(factor_n, best_ne[:, k], FLOAT32)}
    return found | {
        words.format("", k + 1) for k in range(1, len(gate_ed)) if same(factor_n, 1 / best_ne[:, k], FLOAT32)
    }


@torch.no_grad()
def _of_first_experts(first: FirstDifference, trace: Trace, experts: nn.Module, name: str, num: int) -> str | None:
    """Explain outputs in which each rank's first expert also stands in for those of other ranks."""
    tp = trace.axes.size("tp")
    if tp == 1 or num % tp:
        return None
    for value in first.wrong:
        x_nd = torch.from_numpy(trace.reference[value.cell][f"input of {name}"])
        if x_nd.dim() != 2 or value.observed.shape != x_nd.shape or x_nd.shape[1] < num:
            return None
        one_n1 = torch.ones(len(x_nd), 1, dtype=torch.int64)
        outs_end = torch.stack([experts(x_nd, e * one_n1, one_n1.to(x_nd.dtype)) for e in range(num)]).numpy()
        found = np.zeros_like(value.expected)
        for at, due_d in enumerate(value.expected):
            due_e = np.linalg.lstsq(outs_end[:, at].T, due_d, rcond=None)[0]
            extra = [due_e.sum() - due_e[rank * num // tp : (rank + 1) * num // tp].sum() for rank in range(tp)]
            found[at] = due_d + sum(more * outs_end[rank * num // tp, at] for rank, more in enumerate(extra))
        if not same(value.observed, found, FLOAT32):
            return None
    return "each tp rank's first expert also computes the choices of other ranks' experts, with their routing weights"


def logged_losses(source: ReferenceTrace, sides: Sides, step: int) -> str | None:
    """Return the cause of a wrong loss whose gradients are right, if it is a factor of the auxiliary losses in it."""
    parts: dict[str, float] = defaultdict(float)
    for _, handle in auxiliary_losses(source.plain.module):
        if (total := handle.take()) is not None:
            parts[handle.name] += float(total)
    losses, due = sides.evidence.series("loss", step), sides.references[step - 1].loss  # which forgets those parts
    for names in ([*parts], *([name] for name in parts)):
        part = sum(parts[name] for name in names)
        factors = [1.0 + (loss - due) / part for loss in losses] if abs(part) > RIGHT * abs(due) else [1.0]
        factor, error = round(factors[0], 6) + 0.0, FLOAT32 * abs(factors[0])
        cause = "they are not added" if factor == 0.0 else factor_cause(factor, sides.counts, max_rarity=2)
        if factor != 1.0 and max(abs(each - factor) for each in factors) <= error + RIGHT and (cause or factor == 2.0):
            cause = ", or ".join([*([cause] if cause else []), *(["added twice"] if factor == 2.0 else [])])
            what = f"the {' and '.join(names)} loss{'es' if len(names) > 1 else ''}"
            return (
                f"the loss that is reported contains {what} {number_words(factor)} times: {cause}; gradients are right"
            )
    return None
