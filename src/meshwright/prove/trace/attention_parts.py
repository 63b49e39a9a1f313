"""Explain an attention or a loss whose inputs are right: run attention once more on the recorded queries, keys and
values, with other masks and scales, and the backward by parts; find the targets of a loss in the gradient of logits.

Shapes: b samples, t tokens, q queries, k keys, n heads, m key/value heads, h head_dim, v vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from meshwright.nn.attention.mask_spec import MaskSpec
from meshwright.nn.transformer_block import Attention
from meshwright.prove.judge.tensors import Array
from meshwright.prove.record.definitions import plain_attention, visible_pairs
from meshwright.prove.result import coordinates, index_words, number_words
from meshwright.prove.trace.first_difference import ROUNDING, TOKENS, FirstDifference, LocalValue, Places, Trace, take
from meshwright.prove.trace.probe import GRADIENT
from meshwright.prove.trace.relations import close, factor_of, name_order

LOST = "don't reach {}, or are not merged there"


@dataclass(frozen=True)
class _Cell:
    """An attention on a micro-batch, and the ranks of its tokens."""

    q_bqnh: Tensor
    k_bkmh: Tensor
    v_bkmh: Tensor
    spec: MaskSpec
    lengths: tuple[tuple[int, ...], ...]
    """Lengths of the documents of each sample."""
    rank_bt: Tensor
    """Context-parallel rank of each token."""
    place_bt: Tensor
    """Place of each token on its rank."""

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return 1.0 / math.sqrt(self.q_bqnh.shape[-1])

    def seen(self, spec: MaskSpec, lengths: tuple[tuple[int, ...], ...] | None = None) -> Tensor:
        """Return which keys each query sees by some rules, [b, q, k]."""
        size = len(self.q_bqnh)
        seen = torch.stack([visible_pairs(spec, one) for one in lengths or self.lengths])
        return seen.expand(size, -1, -1)

    def shared(self) -> Tensor:
        """Return whether each pair of tokens is on the same rank, [b, q, k]."""
        return self.rank_bt[:, :, None] == self.rank_bt[:, None, :]

    def at(self, seen_bqk: Tensor, index_bt: Tensor) -> Tensor:
        """Return a mask between tokens that are believed to be at other indices."""
        sample = torch.arange(len(seen_bqk))[:, None, None]
        return seen_bqk[sample, index_bt[:, :, None], index_bt[:, None, :]]


Mask = Callable[[_Cell], Tensor]


def explain_attention(first: FirstDifference, trace: Trace) -> str | None:
    """Return the cause of a wrong output or wrong gradients of an attention core, or None if it is not recognised."""
    what, core = first.name.removeprefix(GRADIENT).split(" of ", 1)
    module = trace.module(core.removesuffix(".core"))
    if not core.endswith(".core") or not isinstance(module, Attention):
        return None
    cells = {value.cell: _cell(trace, value.cell, core, module) for value in first.wrong}
    found = {cell: one for cell, one in cells.items() if one is not None}
    if len(found) < len(cells):
        return None
    if first.name.startswith(GRADIENT):
        return _backward(first, trace, core, found, what) if what in ("queries", "keys", "values") else None
    return _forward(first, trace, found)


def _cell(trace: Trace, cell: int, core: str, module: Attention) -> _Cell | None:
    values = trace.reference[cell]
    layout = None if trace.source is None else trace.source.layouts[cell]
    if layout is None or any(f"{what} of {core}" not in values for what in ("queries", "keys", "values")):
        return None
    q, k, v = (torch.from_numpy(values[f"{what} of {core}"]) for what in ("queries", "keys", "values"))
    lengths = layout.documents or ((layout.seq_len,),)
    tokens = [np.asarray(one) for one in trace.tokens.get(cell, [np.arange(layout.seq_len)])]
    flat_bt = torch.from_numpy(np.concatenate([np.broadcast_to(one, (len(q), one.shape[-1])) for one in tokens], 1))
    order_bt, size = flat_bt.argsort(-1), tokens[0].shape[-1]
    return _Cell(q, k, v, module.mask, lengths, order_bt // size, order_bt % size)


def _forward(first: FirstDifference, trace: Trace, cells: dict[int, _Cell]) -> str | None:
    for cause, mask, factor in _candidates(trace, next(iter(cells.values())), first):
        outputs = {
            cell: plain_attention(one.q_bqnh, one.k_bkmh, one.v_bkmh, mask(one), factor * one.scale).numpy()
            for cell, one in cells.items()
        }
        if all(close(value.observed, take(outputs[value.cell], value.index)) for value in first.wrong):
            return cause
    return None


def _candidates(trace: Trace, cell: _Cell, first: FirstDifference) -> Iterator[tuple[str, Mask, float]]:
    """Yield causes, the keys that queries then see, and factors of the scores."""
    right: Mask = lambda one: one.seen(one.spec)  # noqa: E731
    for cause, mask in _masks(cell, right):
        yield cause, mask, 1.0
    size = cell.q_bqnh.shape[-1]
    for factor, cause in (
        (size**0.5, "scores are not scaled by 1 / √head_dim"),
        (size**-0.5, "scores are scaled twice"),
    ):
        yield cause, right, factor
    for factor in (2.0, 0.5):
        yield f"scores have {number_words(factor)} × their scale", right, factor
    if trace.axes.cp > 1:
        yield from ((cause, mask, 1.0) for cause, mask in _context_masks(trace, first))


def _masks(cell: _Cell, right: Mask) -> Iterator[tuple[str, Mask]]:
    """Yield wrong rules of masks, whatever the layout."""
    spec, whole = cell.spec, len(cell.lengths[0]) > 1 or len(cell.lengths) > 1
    if whole:
        yield "documents are ignored: tokens attend across documents", lambda one: one.seen(spec, _joined(one))
    if spec.causal:
        yield (
            "queries see later tokens: the mask is not causal",
            lambda one: one.seen(replace(spec, causal=False, prefix=0)),
        )
        yield (
            "queries don't see their own token: the mask is one off",
            lambda one: right(one) & ~torch.eye(one.q_bqnh.shape[1], dtype=torch.bool),
        )
        yield "queries see the next token: the mask is one off", lambda one: right(one) | _next(one)
    if spec.window is not None:
        yield "the window is ignored", lambda one: one.seen(replace(spec, window=None))
        for off in (1, -1):
            if spec.window + off > 0:
                cause = f"the window is one too {'large' if off > 0 else 'small'}"
                yield cause, lambda one, off=off: one.seen(replace(spec, window=spec.window + off))  # type: ignore[misc]


def _joined(one: _Cell) -> tuple[tuple[int, ...], ...]:
    return tuple((sum(lengths),) for lengths in one.lengths)


def _next(one: _Cell) -> Tensor:
    return torch.diag(torch.ones(one.q_bqnh.shape[1] - 1, dtype=torch.bool), 1)


def _context_masks(trace: Trace, first: FirstDifference) -> Iterator[tuple[str, Mask]]:
    """Yield wrong masks under context parallelism."""

    def right(one: _Cell) -> Tensor:
        return one.seen(one.spec)

    def elsewhere(mask: Mask) -> Mask:
        """Return a mask that is right for keys of the query's own rank only."""
        return lambda one: torch.where(one.shared(), right(one), mask(one))

    def received(mask: Mask) -> Mask:
        """Return a mask of the keys that a rank has: its own, and those that any of its queries may see."""

        def found(one: _Cell) -> Tensor:
            own = one.shared()
            return mask(one) & (own | (own.float() @ right(one).float()).bool())

        return found

    def same_document(one: _Cell) -> Tensor:
        return one.seen(MaskSpec())

    def by_ranks(one: _Cell) -> Tensor:
        return (one.rank_bt[:, :, None] > one.rank_bt[:, None, :]) & same_document(one)

    yield (
        "queries miss the keys of other cp ranks: attention is local to each rank",
        lambda one: right(one) & one.shared(),
    )
    local = "is evaluated at local positions: places in the cp ranks' shards instead of positions in the sample"
    contiguous = "the mask takes the tokens of each cp rank for consecutive ones, but they are in a balanced order"
    for cause, mask in (
        (f"the mask {local}", lambda one: one.at(right(one), one.place_bt)),
        (f"the mask of keys from other cp ranks {local}", elsewhere(lambda one: one.at(right(one), one.place_bt))),
        (contiguous, lambda one: one.at(right(one), one.rank_bt * (one.place_bt.max() + 1) + one.place_bt)),
        ("keys of other cp ranks are masked by the order of ranks, not of tokens", elsewhere(by_ranks)),
        ("keys of other cp ranks are not masked: queries see later tokens", elsewhere(same_document)),
        (
            "the window is ignored for keys of other cp ranks",
            elsewhere(lambda one: one.seen(replace(one.spec, window=None))),
        ),
        (
            "documents are ignored under cp: tokens attend across documents, where keys are on another cp rank",
            elsewhere(lambda one: one.seen(one.spec, _joined(one))),
        ),
    ):
        yield cause, mask
        yield cause, received(mask)
    ranks = sorted({value.rank for value in first.wrong})
    positions = sorted({trace.axes.coordinate(rank)["cp"] for rank in ranks})
    others = "the other cp ranks" if len(positions) > 1 else f"cp rank {positions[0]}"
    for rank in range(trace.axes.cp):
        cause = f"keys and values of cp rank {rank} {LOST.format(others)}"
        yield cause, lambda one, rank=rank: right(one) & (one.shared() | (one.rank_bt != rank)[:, None, :])  # type: ignore[misc]


def _backward(first: FirstDifference, trace: Trace, core: str, cells: dict[int, _Cell], what: str) -> str | None:
    """Fit gradients of keys, values or queries by parts: from queries on the key's own rank, and from others."""
    factors: list[float] = []
    for value in first.wrong:
        one, name = cells[value.cell], f"{GRADIENT}output of {core}"
        if name not in trace.reference[value.cell]:
            return None
        parts = _parts(one, torch.from_numpy(trace.reference[value.cell][name]), what)
        own, rest = (take(part.numpy(), value.index) for part in parts)
        found = _factor(value, own, rest)
        if found is None:
            return None
        factors.append(found)
    if max(factors) - min(factors) > 1e-6:
        return None
    factor = factors[0]
    how = {0.0: "not returned", 2.0: "returned twice"}.get(round(factor, 6), f"{number_words(factor)} × returned")
    return f"gradients of {what} are {how} to the cp rank that owns them"


def _parts(one: _Cell, gradient: Tensor, what: str) -> tuple[Tensor, Tensor]:
    """Return the gradients from queries on the same rank as the key, and from those on others."""
    inputs = {"queries": one.q_bqnh, "keys": one.k_bkmh, "values": one.v_bkmh}
    right, found = one.seen(one.spec), []
    for other in (False, True):
        x = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items()}
        total = torch.zeros_like(inputs[what])
        for rank in range(int(one.rank_bt.max()) + 1):
            out = plain_attention(x["queries"], x["keys"], x["values"], right, one.scale)
            is_query = (one.rank_bt == rank)[:, :, None, None]
            (part,) = torch.autograd.grad(out, [x[what]], gradient * is_query)
            is_own = (one.rank_bt == rank)[:, :, None, None]
            total = total + torch.where(is_own != other, part, torch.zeros_like(part))
        found.append(total)
    return found[0], found[1]


def _factor(value: LocalValue, own: np.ndarray, rest: np.ndarray) -> float | None:
    """Return c such that the value is own + c · rest."""
    if not rest.any():
        return None
    factor = factor_of(value.observed - own, rest)
    return factor if close(value.observed, own + factor * rest) else None


IGNORED = -100
"""Target of a token that has none."""
SHARDED_APART = "inputs and targets are sharded apart: targets: "


def explain_loss(first: FirstDifference, trace: Trace) -> str | None:
    """Return the cause of wrong gradients of a model's output, or None if it is not recognised."""
    if not first.name.startswith(f"{GRADIENT}output of ") or any(n.startswith(GRADIENT) for n in first.right_before):
        return None
    words = [_loss(value, trace) for value in first.wrong]
    found = list(dict.fromkeys(one for one in words if one is not None))
    if None in words or not found:
        return None
    return "; ".join(found[:2]) + (f", and {len(found) - 2} more" if len(found) > 2 else "")


def _loss(value: LocalValue, trace: Trace) -> str | None:
    logits = trace.reference[value.cell].get(value.name.removeprefix(GRADIENT))
    due = None if trace.source is None else trace.source.targets[value.cell].numpy()
    if due is None or logits is None or logits.ndim != 3 or due.shape != logits.shape[:2] or due.dtype.kind != "i":
        return None
    chance, target = _softmax(logits), _one_hot(due, logits.shape[-1])
    has_target = (due != IGNORED)[..., None]
    unit = factor_of(value.full, (chance - target) * has_target)
    if not unit or not close(value.full, unit * (chance - target) * has_target):
        return None
    extra = (value.observed - value.expected) / unit
    log_sum = torch.from_numpy(logits).logsumexp(-1, keepdim=True).numpy()
    for part, words in (
        (2.0 * log_sum * chance * has_target, "the loss has a z-loss that the reference doesn't have: {} × logsumexp²"),
        ((target - 1.0 / logits.shape[-1]) * has_target, "targets are smoothed: label smoothing of {}"),
    ):
        local = take(part, value.index)
        factor = factor_of(extra, local)
        if factor and close(extra, factor * local, value.rounding):
            return words.format(f"{factor:.3g}")
    return _local_sum(value, trace, logits, target, unit) or _targets(value, trace, chance, due, unit)


def _softmax(logits: Array) -> Array:
    found: Array = torch.from_numpy(logits).softmax(-1).numpy()
    return found


def _one_hot(targets: Places, size: int) -> Array:
    found: Array = (targets[..., None] == np.arange(size)).astype(np.float64)
    return found


def _local_sum(value: LocalValue, trace: Trace, logits: Array, target: Array, unit: float) -> str | None:
    if value.observed.shape[-1] == value.full.shape[-1]:
        return None
    local = _softmax(take(logits, value.index)) - take(target, value.index)
    is_local = close(value.observed, unit * local, value.rounding)
    words = "the softmax's denominator is the sum of each tp rank's own classes: its sum over tp is missing"
    return words if is_local else None


def _targets(value: LocalValue, trace: Trace, chance: Array, due_bt: Places, unit: float) -> str | None:
    """Name the targets that a rank uses, which stand in its gradient of logits."""
    if value.observed.shape[-1] != value.full.shape[-1]:
        return None
    target = take(chance, value.index) - value.observed / unit
    lost = np.asarray(~value.observed.any(-1))
    used = np.where(lost, IGNORED, target.argmax(-1))
    if not close(np.where(lost[..., None], 0.0, target), _one_hot(used, target.shape[-1]), ROUNDING):
        return None
    for words, other_bt in _other_targets(value, trace, due_bt):
        if np.array_equal(other_bt, used):
            return words
    own = take(due_bt, value.index[:2])
    wrong = used != own
    if (used[wrong] == IGNORED).all():
        return f"targets are lost {_where(value, wrong)}"
    if (own[wrong] == IGNORED).all():
        return f"tokens that have no target have one {_where(value, wrong)}"
    for shift, words in ((1, "previous"), (-1, "next")):
        if not trace.tokens and np.array_equal(np.roll(due_bt, shift, 1)[:, 1:-1], used[:, 1:-1]):
            return f"each token has the target of the {words} one"
    return f"tokens have other targets {_where(value, wrong)}"


def _other_targets(value: LocalValue, trace: Trace, due_bt: Places) -> Iterator[tuple[str, Places]]:
    """Yield targets of other micro-batches, and those of other tokens of the sample under context parallelism."""
    assert trace.source is not None, "there is a reference"
    for cell, other in enumerate(trace.source.targets):
        if cell != value.cell and other.shape == due_bt.shape:
            rank, microbatch = divmod(cell, trace.num_microbatches)
            whose = f" of data-parallel rank {rank}" if rank != value.cell // trace.num_microbatches else ""
            here = value.cell % trace.num_microbatches
            yield (
                f"micro-batch {here} has the targets of micro-batch {microbatch}{whose}",
                take(other.numpy(), value.index[:2]),
            )
    own, rank = trace.tokens.get(value.cell, []), coordinates(trace.axes)[value.rank]["cp"]
    orders = [np.asarray(one) for one in own if np.asarray(one).ndim == 1]
    size = value.observed.shape[TOKENS]
    if orders:
        orders += [np.arange(size) + rank * size, orders[rank][::-1], np.roll(orders[rank], -(size // 2))]
    for order in orders:
        named = name_order(order, value, trace) if order.max() < due_bt.shape[1] else None
        if named is not None:
            yield SHARDED_APART + named, take(due_bt, (value.index[0], order))


def _where(value: LocalValue, wrong: np.ndarray) -> str:
    """Describe tokens of a shard by their positions in the samples, and by rows if these differ in them."""
    rows, tokens = value.index[0], np.broadcast_to(value.index[TOKENS], wrong.shape)
    places = {int(row): tokens[at][wrong[at]].tolist() for at, row in enumerate(rows) if wrong[at].any()}
    one, *others = places.values()
    if any(other != one for other in others):
        count = sum(len(one) for one in places.values())
        return f"of {count} tokens in {_numbered('row', sorted(places))} of the micro-batch"
    at = "at every position" if len(one) == wrong.shape[1] else f"at {_numbered('position', one)}"
    return at if len(places) == len(rows) else f"{at} of {_numbered('row', sorted(places))} of the micro-batch"


def _numbered(what: str, places: list[int]) -> str:
    return f"{what}{'s' if len(places) > 1 else ''} {index_words(places)}"
