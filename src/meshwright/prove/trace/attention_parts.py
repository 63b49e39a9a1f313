"""Explain an attention whose inputs are right: run it once more on the recorded queries, keys and values, with other
masks and scales, and its backward by parts.

Shapes: b samples, t tokens, q queries, k keys, n heads, m key/value heads, h head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn

from meshwright.nn.attention.attention import PLAIN, ScoreRules
from meshwright.nn.attention.mask_spec import MaskSpec
from meshwright.prove.record.definitions import plain_attention, visible_pairs
from meshwright.prove.result import number_words
from meshwright.prove.trace.first_difference import FirstDifference, Trace, take
from meshwright.prove.trace.probe import CORE_VALUES, GRADIENT
from meshwright.prove.trace.relations import close, factor_of
from meshwright.units import counted

Hypothesis = tuple[str, Tensor, float, "_Cell | None"]
"""A cause, which keys queries see then [b, q, k], the factor of the scores, and the micro-batch of which queries see
the keys and values of other context-parallel ranks; None for their own."""


@dataclass(frozen=True)
class _Cell:
    """An attention on a micro-batch, and the ranks of its tokens."""

    cell: int
    core: str
    module: nn.Module
    q_bqnh: Tensor
    k_bkmh: Tensor
    v_bkmh: Tensor
    spec: MaskSpec
    scores: ScoreRules
    lengths: tuple[tuple[int, ...], ...]
    """Lengths of the documents of each sample."""
    rank_bt: Tensor
    """Context-parallel rank of each token."""
    place_bt: Tensor
    """Place of each token on its rank."""

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return self.q_bqnh.shape[-1] ** -0.5 if self.scores.scale is None else self.scores.scale

    @cached_property
    def right(self) -> Tensor:
        """Which keys each query sees, [b, q, k]."""
        return self.seen(self.spec)

    @cached_property
    def shared(self) -> Tensor:
        """Whether each pair of tokens is on the same rank, [b, q, k]."""
        return self.rank_bt[:, :, None] == self.rank_bt[:, None, :]

    def seen(
        self, spec: MaskSpec, *, joined: bool = False, lengths: tuple[tuple[int, ...], ...] | None = None
    ) -> Tensor:
        """Return which keys each query sees by other rules or documents, [b, q, k]; as if samples were one document, if
        `joined`."""
        found = [(sum(one),) if joined else one for one in lengths or self.lengths]
        return torch.stack([visible_pairs(spec, one) for one in found]).expand(len(self.q_bqnh), -1, -1)

    def at(self, index_bt: Tensor) -> Tensor:
        """Return the mask between tokens that are believed to be at other indices."""
        sample = torch.arange(len(self.right))[:, None, None]
        return self.right[sample, index_bt[:, :, None], index_bt[:, None, :]]

    def run(self, seen_bqk: Tensor, factor: float = 1.0, others: _Cell | None = None) -> Tensor:
        """Return the output with some mask and factor of the scores, and what other ranks sent of a micro-batch."""
        scale = factor * self.scale
        if others is None:
            return plain_attention(self.q_bqnh, self.k_bkmh, self.v_bkmh, seen_bqk, scale, self.scores)
        out = torch.zeros_like(self.q_bqnh)
        for rank in range(int(self.rank_bt.max()) + 1):
            is_own = (self.rank_bt == rank)[:, :, None, None]
            keys, values = (
                torch.where(is_own, a, b) for a, b in ((self.k_bkmh, others.k_bkmh), (self.v_bkmh, others.v_bkmh))
            )
            out += is_own * plain_attention(self.q_bqnh, keys, values, seen_bqk, scale, self.scores)
        return out


def explain_attention(first: FirstDifference, trace: Trace) -> str | None:
    """Return the cause of a wrong output or wrong gradients of an attention core, or None if it is not recognised."""
    what, core = first.what.removeprefix(GRADIENT), first.module
    module = trace.module(core.removesuffix(".core"))
    if not core.endswith(".core") or module is None or not isinstance(getattr(module, "mask", None), MaskSpec):
        return None
    cells = {value.cell: _cell(trace, value.cell, core, module) for value in first.wrong}
    found = {cell: one for cell, one in cells.items() if one is not None}
    if len(found) < len(cells):
        return None
    if not first.is_gradient:
        return _forward(first, trace, found)
    return _backward(first, trace, core, found, what) if what in ("keys", "values") else None


def _cell(trace: Trace, cell: int, core: str, module: nn.Module) -> _Cell | None:
    values = trace.reference[cell]
    layout = trace.source.layouts[cell]
    if layout is None or any(f"{what} of {core}" not in values for what in CORE_VALUES):
        return None
    q, k, v = (torch.from_numpy(values[f"{what} of {core}"]) for what in CORE_VALUES)
    lengths = layout.documents or ((layout.seq_len,),)
    rank_bt, place_bt = (torch.from_numpy(one) for one in trace.context_places(cell, len(q), layout.seq_len))
    spec, scores = cast("MaskSpec", module.mask), trace.source.scores.get(core, PLAIN)
    return _Cell(cell, core, module, q, k, v, spec, scores, lengths, rank_bt, place_bt)


def _forward(first: FirstDifference, trace: Trace, cells: dict[int, _Cell]) -> str | None:
    """Run attention by each hypothesis, which come in the same order in all micro-batches."""
    lacking = (list(_without(one)) for one in cells.values())
    for others in zip(*lacking, strict=True):
        outputs = {cell: one.run(one.right).numpy() for cell, (_, one) in zip(cells, others, strict=True)}
        if all(close(value.observed, take(outputs[value.cell], value.index)) for value in first.wrong):
            return str(others[0][0])
    all_tried: Iterator[tuple[Hypothesis, ...]] = zip(
        *(_hypotheses(one, trace, first) for one in cells.values()), strict=True
    )
    for tried in all_tried:
        outputs = {cell: one.run(*how[1:]).numpy() for (cell, one), how in zip(cells.items(), tried, strict=True)}
        if all(close(value.observed, take(outputs[value.cell], value.index)) for value in first.wrong):
            return tried[0][0]
    return None


def _without(one: _Cell) -> Iterator[tuple[str, _Cell]]:
    """Yield an attention without rules of its scores."""
    if one.scores.sinks_n is not None:
        yield "sinks are left out: keys get all of the softmax", replace(one, scores=replace(one.scores, sinks_n=None))
    if one.scores.soft_cap is not None:
        yield "scores are not capped", replace(one, scores=replace(one.scores, soft_cap=None))


def _hypotheses(one: _Cell, trace: Trace, first: FirstDifference) -> Iterator[Hypothesis]:
    """Yield what may be wrong in an attention, simple faults first."""
    masks = {name: mask for name, mask in trace.masks.items() if name != one.core.removesuffix(".core")}
    for cause, seen in (*_masks(one, masks), *_other_documents(one, trace)):
        yield cause, seen, 1.0, None
    yield "scores are not scaled by 1 / √head_dim", one.right, 1 / one.scale, None
    yield "scores are scaled twice", one.right, one.scale, None
    for factor in (2.0, 0.5):
        yield f"scores have {number_words(factor)} × their scale", one.right, factor, None
    if trace.axes.cp == 1:
        return
    cause = "queries miss the keys of other cp ranks: attention is local to each rank"
    yield cause, one.right & one.shared, 1.0, None
    for which, cell in _earlier(one, trace):
        cause = f"the keys and values received from other cp ranks are those of {which}: a stale buffer"
        yield cause, one.right, 1.0, _cell(trace, cell, one.core, one.module)
    # The keys that a rank has: its own, and those that any of its queries may see.
    received = one.shared | (one.shared.float() @ one.right.float()).bool()
    for cause, seen in _context_masks(one):
        yield cause, seen, 1.0, None
        yield cause, seen & received, 1.0, None
    positions = sorted({trace.axes.coordinate(value.rank)["cp"] for value in first.wrong})
    others = "the other cp ranks" if len(positions) > 1 else f"cp rank {positions[0]}"
    for rank in range(trace.axes.cp):
        cause = f"keys and values of cp rank {rank} don't reach {others}, or are not merged there"
        yield cause, one.right & (one.shared | (one.rank_bt != rank)[:, None, :]), 1.0, None
    for hops in range(1, trace.axes.cp):
        sender_bq1 = ((one.rank_bt - hops) % trace.axes.cp)[:, :, None]
        late = " (the last: the ring ends one hop early)" if hops == trace.axes.cp - 1 else ""
        cause = f"keys and values that arrive after {counted(hops, 'hop')}{late} are not merged"
        yield cause, one.right & (one.rank_bt[:, None, :] != sender_bq1), 1.0, None


def _masks(one: _Cell, masks: Mapping[str, MaskSpec]) -> Iterator[tuple[str, Tensor]]:
    """Yield wrong masks, whatever the layout, given those of all attentions."""
    spec, diagonal = one.spec, torch.eye(one.q_bqnh.shape[1], dtype=torch.bool)
    yield "documents are ignored: tokens attend across documents", one.seen(spec, joined=True)
    if spec.causal:
        yield "queries see later tokens: the mask is not causal", one.seen(replace(spec, causal=False, prefix=0))
        yield "queries don't see their own token: the mask is one off", one.right & ~diagonal
        yield "queries see the next token: the mask is one off", one.right | torch.diag(diagonal.diagonal()[1:], 1)
    for name, mask in masks.items():
        if mask != spec:
            yield f"the mask is that of {name}", one.seen(mask)
    if spec.window is not None:
        yield "the window is ignored", one.seen(replace(spec, window=None))
        for word, window in (("large", spec.window + 1), ("small", spec.window - 1)):
            if window > 0:
                yield f"the window is one too {word}", one.seen(replace(spec, window=window))


def _other_documents(one: _Cell, trace: Trace) -> Iterator[tuple[str, Tensor]]:
    """Yield the masks of other documents: one token longer or shorter, or those of another sample or micro-batch."""
    for off, word in ((1, "late"), (-1, "early")):
        for which, last in (("documents end", -1), ("each sample's first document ends", 1)):
            moved = tuple(_moved(lengths, off, last) for lengths in one.lengths)
            yield f"{which} one token {word} in the mask", one.seen(one.spec, lengths=moved)
    first = (one.lengths[0],) * len(one.lengths)
    yield "the mask has the documents of the first sample of the micro-batch", one.seen(one.spec, lengths=first)
    for which, cell in _earlier(one, trace):
        layout = trace.source.layouts[cell]
        documents = None if layout is None else layout.documents
        seen = one.right if documents is None else one.seen(one.spec, lengths=documents)
        yield f"the mask has the documents of {which}: it is made once, or kept", seen


def _earlier(one: _Cell, trace: Trace) -> Iterator[tuple[str, int]]:
    """Yield other micro-batches of the data-parallel rank; the own one where there is none before."""
    number = one.cell % trace.num_microbatches
    if trace.num_microbatches > 1:
        yield "the first micro-batch", one.cell - number
    for back in range(1, trace.num_microbatches):
        which = "the micro-batch before" if back == 1 else f"the micro-batch {back} before"
        yield which, one.cell - min(back, number) if back <= number else one.cell


def _moved(lengths: tuple[int, ...], off: int, last: int) -> tuple[int, ...]:
    """Return lengths of documents of which those before `last` end earlier or later."""
    found = list(lengths)
    if len(found) > 1 and min(found[0] + off, found[last] - off) > 0:
        found[0], found[last] = found[0] + off, found[last] - off
    return tuple(found)


def _context_masks(one: _Cell) -> Iterator[tuple[str, Tensor]]:
    """Yield wrong masks under context parallelism."""
    local = "is evaluated at local positions: places in the cp ranks' shards instead of positions in the sample"
    at_places, same_document = one.at(one.place_bt), one.seen(MaskSpec())
    yield f"the mask {local}", at_places
    cause = "the mask takes the tokens of each cp rank for consecutive ones, but they are in a balanced order"
    yield cause, one.at(one.rank_bt * (one.place_bt.max() + 1) + one.place_bt)
    of_others = {
        f"the mask of keys from other cp ranks {local}": at_places,
        "keys of other cp ranks are masked by the order of ranks, not of tokens":
            (one.rank_bt[:, :, None] > one.rank_bt[:, None, :]) & same_document,
        "keys of other cp ranks are not masked: queries see later tokens": same_document,
        "the window is ignored for keys of other cp ranks": one.seen(replace(one.spec, window=None)),
        **{
            f"the window is one too {word} for keys of other cp ranks": one.seen(replace(one.spec, window=window))
            for word, window in (("large", (one.spec.window or 0) + 1), ("small", (one.spec.window or 2) - 1))
            if one.spec.window is not None and window > 0
        },
        "documents are ignored under cp: tokens attend across documents, where keys are on another cp rank":
            one.seen(one.spec, joined=True),
    }  # fmt: skip
    for cause, seen in of_others.items():
        yield cause, torch.where(one.shared, one.right, seen)


def _backward(first: FirstDifference, trace: Trace, core: str, cells: dict[int, _Cell], what: str) -> str | None:
    """Fit gradients of keys or values by parts: from queries on the key's own rank, and from others."""
    name, factors = f"{GRADIENT}output of {core}", []
    for value in first.wrong:
        if name not in trace.reference[value.cell]:
            return None
        parts = _parts(cells[value.cell], torch.from_numpy(trace.reference[value.cell][name]), what)
        own, rest = (take(part.numpy(), value.index) for part in parts)
        factors.append(factor_of(value.observed - own, rest))
        if not rest.any() or not close(value.observed, own + factors[-1] * rest):
            return None
    if max(factors) - min(factors) > 1e-6:
        return None
    how = {0.0: "not returned", 2.0: "returned twice"}.get(
        round(factors[0], 6), f"{number_words(factors[0])} × returned"
    )
    return f"gradients of {what} are {how} to the cp rank that owns them"


def _parts(one: _Cell, gradient: Tensor, what: str) -> tuple[Tensor, Tensor]:
    """Return the gradients from queries on the same rank as the key, and from those on others."""
    x = (one.v_bkmh if what == "values" else one.k_bkmh).clone().requires_grad_()
    out = (replace(one, v_bkmh=x) if what == "values" else replace(one, k_bkmh=x)).run(one.right)
    (total,) = torch.autograd.grad(out, x, gradient, retain_graph=True)
    own = torch.zeros_like(total)
    for rank in range(int(one.rank_bt.max()) + 1):
        is_own = (one.rank_bt == rank)[:, :, None, None]
        own += is_own * torch.autograd.grad(out, x, gradient * is_own, retain_graph=True)[0]
    return own, total - own
