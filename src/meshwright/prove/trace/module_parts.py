"""Explain a module whose input is right by running it again in other ways: a dropout with other masks, a table with
other ids, a layer with earlier weights, another activation, and a loss with other targets, which stand in
the gradient of logits.

Shapes: b samples, t tokens, n tokens of all samples, d features, v rows of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.nn.attention.mask_spec import TokenLayout
from meshwright.nn.attention.positions import token_rows
from meshwright.nn.dropout_add import eager
from meshwright.nn.dropout_add.module import DropoutAdd
from meshwright.prove.judge.tensors import Array
from meshwright.prove.record.definitions import positions
from meshwright.prove.result import index_words, number_words
from meshwright.prove.trace.first_difference import ROUNDING, TOKENS, LocalValue, Places, Trace, take
from meshwright.prove.trace.probe import GRADIENT
from meshwright.prove.trace.relations import Relation, cell_words, close, context_orders, factor_of

Mask = npt.NDArray[np.bool_]
STRONG = 1e-4
"""Part of the largest element from which an element tells whether it is dropped."""
MOST_DISTANCES = 2**28
"""Elements up to which each row of a value is compared with each row of a table."""
NO_ROW = -1
IGNORED = -100
"""Target of a token that has none."""
FLOAT32 = 1e-6
"""Relative difference of what routers of transformers compute in float32."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "GELU": F.gelu,
    "GELU by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "SiLU": F.silu,
    "ReLU": F.relu,
    "squared ReLU": lambda x: F.relu(x).square(),
    "no activation": lambda x: x,
}


# ---- dropout


def _dropout(value: LocalValue, trace: Trace) -> str | None:
    """Recognise what a dropout adds, or its backward returns: x · mask · factor."""
    name, module = value.module, trace.module(value.module)
    source = {"output": "input of ", f"{GRADIENT}input": f"{GRADIENT}output of "}.get(value.what)
    part, layout = trace.at(value, f"{source}{name}"), trace.source.layouts[value.cell]
    if not isinstance(module, DropoutAdd | nn.Dropout | nn.Identity) or part is None:
        return None
    due, scale = np.ones(part.shape, dtype=bool), 1.0
    if isinstance(module, DropoutAdd) and module.p and layout is not None and layout.samples is not None:
        due, scale = _mask(value, module, layout), eager.keep_scale(eager.drop_threshold(module.p))
    added = value.observed - (value.expected - scale * due * part)
    strong = np.abs(part) > STRONG * np.abs(part).max(initial=0.0)
    kept = strong & (np.abs(added) > STRONG * np.abs(part))
    factor = factor_of(added[kept], part[kept])
    if not kept.any() or not close(added[strong], (factor * kept * part)[strong], FLOAT32):
        return None
    if scale == 1.0 and due.all():
        share = 1.0 - kept.sum() / strong.sum()
        is_active = f"dropout is active where the reference has none: {share:.0%} of the elements are dropped"
        return f"{is_active}, others have {number_words(factor)} × their value" if share else None
    if (kept == strong).all():
        return "dropout drops nothing" + (f", but scales by {number_words(factor)}" if abs(factor - 1) > 1e-6 else "")
    if (kept == strong & due).all():
        if abs(factor - scale) <= FLOAT32 * scale:
            return None  # what differs is rounding
        one = ": 1 / (1 − p) is missing" if abs(factor - 1.0) < 1e-6 else ""
        return f"dropout scales what it keeps by {number_words(factor)} instead of {number_words(scale)}{one}"
    other = "dropout drops other elements than those of this module, its seed and these tokens"
    whose = (words for words, mask in _other_masks(value, trace, name, factor) if (kept == strong & mask).all())
    return next((f"{other}: {words}" for words in whose), other)


def _mask(
    value: LocalValue, module: DropoutAdd, layout: TokenLayout, *, p: float | None = None, at: Places | None = None
) -> Mask:
    """Return which elements of a shard a dropout keeps, or of other positions."""
    whole = replace(layout, shards=None, rank=0, stream=(0, 1))
    size, index = value.full.shape[-1], value.index if at is None else (value.index[0], at, *value.index[2:])
    return take(eager.keep_mask(module.key, token_rows(whole), size, module.p if p is None else p).numpy(), index)


def _other_masks(value: LocalValue, trace: Trace, name: str, factor: float) -> Iterator[tuple[str, Mask]]:
    """Yield masks of other modules, samples, positions and probabilities."""
    own, layout = trace.module(name), trace.source.layouts[value.cell]
    assert layout is not None and isinstance(own, DropoutAdd), "the due mask is known"
    for other, module in trace.source.plain.module.named_modules():
        if other != name and isinstance(module, DropoutAdd):
            yield f"those of {other}", _mask(value, module, layout)
    from_0 = replace(layout, samples=tuple(range(len(value.full))))
    yield "samples are counted from 0 in each micro-batch", _mask(value, own, from_0)
    size, batch = len(value.full), trace.source.plain.config.train.global_batch
    for whose, first in (
        ("on each data-parallel rank", value.cell % trace.num_microbatches * size),
        ("in each step", value.cell * size % batch),
    ):
        from_first = replace(layout, samples=tuple(range(first, first + size)))
        yield f"samples are counted from 0 {whose}", _mask(value, own, from_first)
    for cell, one in enumerate(trace.source.layouts):
        if cell != value.cell and one is not None and one.samples is not None:
            yield f"those of samples {index_words(one.samples)}", _mask(value, own, one)
    part = value.observed.shape[TOKENS]
    for start in range(0, value.full.shape[TOKENS] - part + 1, part):
        places = np.arange(start, start + part)
        yield f"those of positions {index_words(places.tolist())}", _mask(value, own, layout, at=places)
    if factor > 1.0:
        p = 1.0 - 1.0 / factor
        yield f"it drops with p = {p:.3g} instead of {own.p:.3g}", _mask(value, own, layout, p=p)


# ---- tables


def _rows(value: LocalValue, trace: Trace) -> str | None:
    """Recognise other rows of an embedding's table, by reading the id of each row from the table."""
    module = trace.module(value.module)
    if (
        value.what != "output"
        or not isinstance(module, nn.Embedding)
        or value.observed.shape[-1] != module.embedding_dim
    ):
        return None
    table = module.weight.detach().double().numpy()
    due, found = (_ids(rows, table) for rows in (value.expected, value.observed))
    if due is None or found is None or (due == NO_ROW).any():
        return None
    found = np.where(np.abs(value.observed - value.expected).max(-1) <= value.rounding * value.scale, due, found)
    return _running_positions(value, trace, due, found) or _name_ids(due, found)


def _ids(rows: Array, table: Array) -> Places | None:
    """Return the place in a table of each row, NO_ROW for a row of zeros; None if a row isn't there."""
    flat, scale = rows.reshape(-1, rows.shape[-1]), float(np.abs(table).max(initial=0.0))
    if flat.size * len(table) > MOST_DISTANCES:
        return None
    found = []
    for row in flat:
        distance = np.abs(table - row).max(-1)
        is_there = distance.min() <= ROUNDING * scale
        if not is_there and row.any():
            return None
        found.append(int(distance.argmin()) if is_there else NO_ROW)
    return np.array(found).reshape(rows.shape[:-1])


def _running_positions(value: LocalValue, trace: Trace, due: Places, found: Places) -> str | None:
    """Recognise positions of a table that don't start again in each document."""
    layout = trace.source.layouts[value.cell]
    if layout is None or layout.documents is None or due.ndim != 2 or len(due) != value.full.shape[0]:
        return None
    tokens_bt = np.broadcast_to(value.index[TOKENS], due.shape)
    all_bt = np.broadcast_to(positions(layout.documents, layout.seq_len).numpy(), (len(due), layout.seq_len))
    base = due - np.take_along_axis(all_bt, tokens_bt, 1)
    is_running = (base == base.flat[0]).all() and np.array_equal(found, tokens_bt + base)
    return "positions don't start again in each document: they count through the sample" if is_running else None


def _name_ids(due: Places, found: Places) -> str | None:
    """Name ids that are moved by one number or to one row; exchanged tokens are others' relation."""
    wrong = found != due
    lost, moved = wrong & (found == NO_ROW), wrong & (found != NO_ROW)
    words = []
    off, ids, at = np.unique((found - due)[moved]), np.unique(due[moved]), np.unique(found[moved])
    only = f": those of {index_words(ids.tolist())}" if (~wrong).any() else ""
    if len(ids) == 1 and len(at) == 1:
        words.append(f"id {ids[0]} has row {at[0]} of the table")
    elif len(off) == 1:
        words.append(f"ids are off by {'+' if off[0] > 0 else '−'}{abs(off[0])}{only}")
    elif len(at) == 1:
        is_most = np.array_equal(moved, due > at[0])
        words.append(f"ids {f'above {at[0]}' if is_most else index_words(ids.tolist())} have row {at[0]} of the table")
    elif moved.any():
        return None
    if lost.any():
        words.append(f"ids {index_words(np.unique(due[lost]).tolist())} have no row: theirs is zero")
    return "; ".join(words)


# ---- layers and activations


def _weights_before(value: LocalValue, trace: Trace) -> str | None:
    """Recognise a layer that uses its weights of an earlier step."""
    name, module = value.module, trace.module(value.module)
    x = trace.reference[value.cell].get(f"input of {name}")
    if value.what != "output" or module is None or x is None or list(module.children()):
        return None
    for step, weights in reversed(list(enumerate(trace.source.earlier, start=1))):
        state = {n: weights[at].to(p) for n, p in module.named_parameters() if (at := f"{name}.{n}") in weights}
        if not state:
            return None
        out = torch.func.functional_call(module, state, torch.from_numpy(x)).numpy()
        if out.shape == value.full.shape and close(value.observed, take(out, value.index), value.rounding):
            return f"{name} uses its weights of step {step}: they were not gathered again after the update"
    return None


def _activation(value: LocalValue, trace: Trace) -> str | None:
    """Recognise another activation, of a module or between the projections of a gated feed-forward layer."""
    parent, _, last = value.module.rpartition(".")
    inputs = [f"input of {value.module}"]
    if value.what == "input" and last.startswith("down"):
        inputs = [f"output of {parent}.{one}{last.removeprefix('down')}" for one in ("gate", "up")]
    elif value.what != "output":
        return None
    found = [one for name in inputs if (one := trace.at(value, name)) is not None]
    if len(found) < len(inputs):
        return None
    x, factor = torch.from_numpy(found[0]), found[-1] if len(found) > 1 else 1.0
    outputs = {kind: run(x).numpy() * factor for kind, run in ACTIVATIONS.items()}
    right = next((kind for kind, out in outputs.items() if close(value.expected, out)), None)
    for kind, out in outputs.items() if right is not None else ():
        if kind != right and close(value.observed, out, value.rounding):
            return f"the activation is another: {kind} instead of {right}"
    return None


# ---- the loss


def _other_loss(value: LocalValue, trace: Trace) -> str | None:
    """Recognise another loss by the gradient of logits, which is (softmax − one-hot target) · a factor."""
    logits = trace.reference[value.cell].get(value.name.removeprefix(GRADIENT))
    due = trace.source.targets[value.cell].numpy()
    if not value.name.startswith(f"{GRADIENT}output of ") or logits is None:
        return None
    if logits.ndim != 3 or due.shape != logits.shape[:2] or due.dtype.kind != "i":
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
    if value.observed.shape[-1] == value.full.shape[-1]:
        return _targets(value, trace, take(chance, value.index) - value.observed / unit, due)
    local = unit * (_softmax(take(logits, value.index)) - take(target, value.index))
    words = "the softmax's denominator is the sum of each tp rank's own classes: its sum over tp is missing"
    return words if close(value.observed, local, value.rounding) else None


def _softmax(logits: Array) -> Array:
    found: Array = torch.from_numpy(logits).softmax(-1).numpy()
    return found


def _one_hot(targets: Places, size: int) -> Array:
    found: Array = (targets[..., None] == np.arange(size)).astype(np.float64)
    return found


def _targets(value: LocalValue, trace: Trace, target: Array, due_bt: Places) -> str | None:
    """Name the targets that a rank uses, which stand in its gradient of logits."""
    lost = np.asarray(~value.observed.any(-1))
    used = np.where(lost, IGNORED, target.argmax(-1))
    if not close(np.where(lost[..., None], 0.0, target), _one_hot(used, target.shape[-1]), ROUNDING):
        return None
    own = take(due_bt, value.index[:2])
    found = [words for words, other_bt in _other_targets(value, trace, due_bt) if np.array_equal(other_bt, used)]
    if not found and (used[used != own] == IGNORED).all():
        return "targets are lost"
    if not found and (own[used != own] == IGNORED).all():
        return "tokens that have no target have one"
    for shift, words in ((1, "previous"), (-1, "next")):
        if not trace.tokens and np.array_equal(np.roll(due_bt, shift, 1)[:, 1:-1], used[:, 1:-1]):
            found.append(f"each token has the target of the {words} one")
    return found[0] if found else "tokens have other targets"


def _other_targets(value: LocalValue, trace: Trace, due_bt: Places) -> Iterator[tuple[str, Places]]:
    """Yield targets of other micro-batches, and those of other tokens of the sample under context parallelism."""
    for cell, other in enumerate(trace.source.targets):
        if cell != value.cell and other.shape == due_bt.shape:
            yield cell_words(value, "targets", cell, trace), take(other.numpy(), value.index[:2])
    local, index = value.index[1], (value.index[0],)
    for shift, words in ((1, "previous"), (-1, "next")) if trace.tokens else ():
        yield (
            f"each token has the target of the {words} one on its rank",
            take(due_bt, (*index, np.roll(local, shift, -1))),
        )
    for words, order in context_orders(value, trace):
        yield f"inputs and targets are sharded apart: targets: {words}", take(due_bt, (value.index[0], order))


RELATIONS: tuple[Relation, ...] = tuple(
    torch.no_grad()(one) for one in (_dropout, _rows, _weights_before, _activation, _other_loss)
)
"""Relations of a value to the module that computes it."""
