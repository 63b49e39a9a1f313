"""Explain a module whose input is right by running it again in other ways: a dropout with other masks, a table with
other ids, a layer with earlier weights, another activation.

Shapes: b samples, t tokens, d features, v rows of a table.
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
from meshwright.prove.trace.relations import Relation, close, factor_of

Mask = npt.NDArray[np.bool_]
STRONG = 1e-4
"""Part of the largest element from which an element tells whether it is dropped."""
MOST_DISTANCES = 2**28
"""Elements up to which each row of a value is compared with each row of a table."""
NO_ROW = -1
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "GELU": F.gelu,
    "GELU by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "SiLU": F.silu,
    "ReLU": F.relu,
    "squared ReLU": lambda x: F.relu(x).square(),
    "no activation": lambda x: x,
}


def _of(value: LocalValue, trace: Trace) -> tuple[str, str, nn.Module | None]:
    """Return what a value is of a module, the module's name, and the reference's module."""
    what, _, name = value.name.rpartition(" of ")
    return what, name, trace.module(name)


# ---- dropout


def _dropout(value: LocalValue, trace: Trace) -> str | None:
    """Recognise what a dropout adds, or its backward returns: x · mask · factor."""
    what, name, module = _of(value, trace)
    source = {"output": "input of ", f"{GRADIENT}input": f"{GRADIENT}output of "}.get(what)
    x = trace.reference[value.cell].get(f"{source}{name}")
    if not isinstance(module, DropoutAdd | nn.Dropout | nn.Identity) or x is None or x.shape != value.full.shape:
        return None
    layout = trace.source.layouts[value.cell] if trace.source is not None else None
    due, scale = np.ones(x.shape, dtype=bool), 1.0
    if isinstance(module, DropoutAdd) and module.p and layout is not None and layout.samples is not None:
        due, scale = _mask(module, layout, x.shape[-1]), eager.keep_scale(eager.drop_threshold(module.p))
    part, kept_due = take(x, value.index), take(due, value.index)
    added = value.observed - (value.expected - scale * kept_due * part)
    strong = np.abs(part) > STRONG * np.abs(part).max(initial=0.0)
    kept = strong & (np.abs(added) > STRONG * np.abs(part))
    if not kept.any():
        return None
    factor = factor_of(added[kept], part[kept])
    if not close(added[strong], (factor * kept * part)[strong]):
        return None
    if scale == 1.0 and due.all():
        share = 1.0 - kept.sum() / strong.sum()
        is_active = f"dropout is active where the reference has none: {share:.0%} of the elements are dropped"
        return f"{is_active}, others have {number_words(factor)} × their value" if share else None
    if (kept == strong).all():
        return "dropout drops nothing" + (f", but scales by {number_words(factor)}" if abs(factor - 1) > 1e-6 else "")
    if (kept == strong & kept_due).all():
        one = ": 1 / (1 − p) is missing" if abs(factor - 1.0) < 1e-6 else ""
        return f"dropout scales what it keeps by {number_words(factor)} instead of {number_words(scale)}{one}"
    other = "dropout drops other elements than those of this module, its seed and these tokens"
    whose = (words for words, mask in _other_masks(value, trace, name, factor) if (kept == strong & mask).all())
    return next((f"{other}: {words}" for words in whose), other)


def _mask(module: DropoutAdd, layout: TokenLayout, size: int, p: float | None = None) -> Mask:
    whole = replace(layout, shards=None, rank=0, stream=(0, 1))
    return eager.keep_mask(module.key, token_rows(whole), size, module.p if p is None else p).numpy()


def _other_masks(value: LocalValue, trace: Trace, name: str, factor: float) -> Iterator[tuple[str, Mask]]:
    """Yield masks of other tokens, samples, modules and probabilities."""
    assert trace.source is not None, "there is a reference"
    modules = {n: m for n, m in trace.source.plain.module.named_modules() if isinstance(m, DropoutAdd)}
    own, layout, size = modules[name], trace.source.layouts[value.cell], value.full.shape[-1]
    assert layout is not None and layout.samples is not None, "the mask of these tokens is known"
    for other, module in modules.items():
        if other != name:
            yield f"those of {other}", take(_mask(module, layout, size), value.index)
    yield (
        "samples are counted from 0 in each micro-batch",
        take(_mask(own, replace(layout, samples=tuple(range(len(layout.samples)))), size), value.index),
    )
    for cell, one in enumerate(trace.source.layouts):
        if cell != value.cell and one is not None and one.samples is not None:
            yield f"those of samples {index_words(one.samples)}", take(_mask(own, one, size), value.index)
    full, part = _mask(own, layout, size), value.observed.shape[TOKENS]
    for start in range(0, value.full.shape[TOKENS] - part + 1, part):
        places = np.arange(start, start + part)
        words = f"those of positions {index_words(places.tolist())}"
        yield words, take(full, (value.index[0], places, *value.index[2:]))
    if factor > 1.0:
        p = 1.0 - 1.0 / factor
        yield f"it drops with p = {p:.3g} instead of {own.p:.3g}", take(_mask(own, layout, size, p), value.index)


# ---- tables


def _rows(value: LocalValue, trace: Trace) -> str | None:
    """Recognise other rows of an embedding's table, by reading the id of each row from the table."""
    what, _, module = _of(value, trace)
    if what != "output" or not isinstance(module, nn.Embedding) or value.observed.shape[-1] != module.embedding_dim:
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
        if not distance.min() <= ROUNDING * scale and row.any():
            return None
        found.append(int(distance.argmin()) if distance.min() <= ROUNDING * scale else NO_ROW)
    return np.array(found).reshape(rows.shape[:-1])


def _running_positions(value: LocalValue, trace: Trace, due: Places, found: Places) -> str | None:
    """Recognise positions of a table that don't start again in each document."""
    layout = trace.source.layouts[value.cell] if trace.source is not None else None
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
    what, name, module = _of(value, trace)
    x = trace.reference[value.cell].get(f"input of {name}")
    if what != "output" or module is None or x is None or trace.source is None or list(module.children()):
        return None
    for step, weights in reversed(list(enumerate(trace.source.earlier, start=1))):
        state = {n: weights[at].to(p) for n, p in module.named_parameters() if (at := f"{name}.{n}") in weights}
        if not state:
            return None
        with torch.no_grad():
            out = torch.func.functional_call(module, state, torch.from_numpy(x))
        if out.shape == value.full.shape and close(value.observed, take(out.numpy(), value.index), value.rounding):
            return f"{name} uses its weights of step {step}: they were not gathered again after the update"
    return None


def _activation(value: LocalValue, trace: Trace) -> str | None:
    """Recognise another activation, of a module or between the projections of a gated feed-forward layer."""
    what, name, _ = _of(value, trace)
    parent, _, last = name.rpartition(".")
    suffix = last.removeprefix("down")
    values, factor = trace.reference[value.cell], None
    if what == "output":
        x = values.get(f"input of {name}")
    elif what == "input" and last.startswith("down"):
        x, factor = (values.get(f"output of {parent}.{one}{suffix}") for one in ("gate", "up"))
    else:
        return None
    if x is None or x.shape != value.full.shape or (factor is not None and factor.shape != x.shape):
        return None
    gate, by = torch.from_numpy(x), 1.0 if factor is None else factor
    outputs = {kind: run(gate).numpy() * by for kind, run in ACTIVATIONS.items()}
    right = next((kind for kind, out in outputs.items() if close(value.full, out)), None)
    for kind, out in outputs.items() if right is not None else ():
        if kind != right and close(value.observed, take(out, value.index), value.rounding):
            return f"the activation is another: {kind} instead of {right}"
    return None


RELATIONS: tuple[Relation, ...] = (_dropout, _rows, _weights_before, _activation)
"""Relations of a value to the module that computes it."""
