"""How a wrong value is related to the right one: scaled, shifted, rotated, exchanged, another layer's, …

Each relation is a function of a value on one rank, and returns words if it explains all of its elements up to rounding.

Shapes: b samples, t tokens, n heads, h head_dim; a value is [b, t, …].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from torch import nn

from meshwright.nn.attention.mask_spec import Documents
from meshwright.prove.judge.tensors import Array
from meshwright.prove.record.definitions import positions
from meshwright.prove.record.evidence import is_bfloat16
from meshwright.prove.result import coordinates, index_words, number_words
from meshwright.prove.trace.first_difference import ROUNDING, TINY, TOKENS, LocalValue, Places, Trace, take
from meshwright.prove.trace.probe import GRADIENT, LAYER, MODEL

Relation = Callable[[LocalValue, Trace], str | None]
LEAST_ROUNDINGS, MOST_ROUNDINGS = 64.0, 32.0
"""Parts and multiples of a dtype's rounding unit, relative to the largest value, that computing in it explains."""
LEAST_SIGNS, MOST_BIAS, LEAST_MEDIAN = 16, 0.5, 0.125
"""Elements by which rounding is told from other small differences, how far from 0 the mean of their signs may be, and
the least median of their relative differences, in rounding units: that of rounding once is 0.35."""
SAME_ANGLE = 1e-7
"""Difference of equal angles."""
APART = 1e-3
"""Least difference between the factors of tokens; less may be rounding."""


def close(a: Array, b: Array, rounding: float = ROUNDING) -> bool:
    """Return whether two arrays are equal up to rounding."""
    if a.shape != b.shape:
        return False
    scale = max(float(np.abs(b).max(initial=0.0)), float(np.abs(a).max(initial=0.0)))
    with np.errstate(invalid="ignore", over="ignore"):
        return bool(np.abs(a - b).max(initial=0.0) <= rounding * scale)


def factor_of(a: Array, b: Array) -> float:
    """Return the c for which c · b is nearest to a; 0 if b is zero."""
    energy = float(np.vdot(b, b))
    return float(np.vdot(b, a)) / energy if energy else 0.0


def token_factors(a: Array, b: Array) -> Array:
    """Return the c of each token, […, 1], for which c · b is nearest to a."""
    factors: Array = (a * b).sum(-1, keepdims=True) / np.maximum((b * b).sum(-1, keepdims=True), TINY)
    return factors


def relate(values: tuple[LocalValue, ...], trace: Trace, relations: Sequence[Relation] | None = None) -> str | None:
    """Return the first relation that holds on all ranks and in all micro-batches, in words; None if there is none."""
    for relation in RELATIONS if relations is None else relations:
        words: list[str] = []
        for value in values:
            found = relation(value, trace)
            if found is None:
                break
            words += [found] if found not in words else []
        else:
            more = f", and {len(words) - 2} more" if len(words) > 2 else ""
            return "; ".join(words[:2]) + more
    return None


def _not_finite(value: LocalValue, trace: Trace) -> str | None:
    return None if np.isfinite(value.observed).all() else "it has NaN or infinite entries"


def _multiple(value: LocalValue, trace: Trace) -> str | None:
    factor = factor_of(value.observed, value.expected)
    if not value.observed.any():
        return "it is zero"
    is_multiple = close(value.observed, factor * value.expected, value.rounding)
    return f"it is {number_words(factor)} × the right one" if is_multiple else None


# ---- another value


def _is(value: LocalValue, name: str, trace: Trace, cell: int | None = None) -> bool:
    """Return whether a value is another one of the reference, of its micro-batch or another."""
    other = trace.at(value, name, cell)
    return other is not None and close(value.observed, other, value.rounding)


def _of_another_cell(value: LocalValue, trace: Trace) -> str | None:
    others = (cell for cell in range(len(trace.reference)) if cell != value.cell)
    cell = next((cell for cell in others if _is(value, value.name, trace, cell)), None)
    return None if cell is None else f"{cell_words(value, 'value', cell, trace)}: a stale or exchanged buffer"


def cell_words(value: LocalValue, what: str, cell: int, trace: Trace) -> str:
    """Say that a value's micro-batch has something of another."""
    (own, here), (dp_rank, there) = (divmod(one, trace.num_microbatches) for one in (value.cell, cell))
    whose = "" if dp_rank == own else f" of data-parallel rank {dp_rank}"
    return f"micro-batch {here} has the {what} of micro-batch {there}{whose}"


def _skipped(value: LocalValue, trace: Trace) -> str | None:
    name, is_model = f"input of {value.module}", value.module == MODEL
    if is_model:  # the last module's output
        name = [one for one in trace.reference[value.cell] if one.startswith("output of ")][-2]
    if value.what != "output" or not _is(value, name, trace):
        return None
    return f"it is the {name}: " + ("nothing is done to it after" if is_model else "the module does nothing")


def _of_another_layer(value: LocalValue, trace: Trace) -> str | None:
    own = LAYER.search(value.name)
    for name in trace.reference[value.cell] if own else ():
        if name != value.name and LAYER.sub(own[0], name, count=1) == value.name and _is(value, name, trace):  # type: ignore[index]
            return f"it is the {name}: layers are exchanged"
    return None


def _residual(value: LocalValue, trace: Trace) -> str | None:
    """Recognise a branch that is scaled before it is added: observed − start = factor · (expected − start).

    The start is a block's input, or what an adapter's base returns.
    """
    for name, words in (
        (f"output of {value.module}.base_layer", "the adapter's part of {} is {} × what it should be"),
        (f"input of {value.module}", "{} adds {} × what it should to its input"),
    ):
        start = trace.at(value, name)
        if value.what == "output" and start is not None:
            added = value.expected - start
            factor = factor_of(value.observed - start, added)
            if close(value.observed, start + factor * added, value.rounding):
                return words.format(value.module, number_words(factor))
    return None


def _part(value: LocalValue, trace: Trace) -> str | None:
    """Recognise a value that lacks what one of the modules within returns, or counts it more than once."""
    difference = value.observed - value.expected
    within = [name for name in trace.reference[value.cell] if name.startswith(f"{value.name}.")]
    within.sort(key=lambda name: name.count("."))
    for name in within if value.what in ("output", f"{GRADIENT}input") else ():
        part = trace.at(value, name)
        factor = 0.0 if part is None else factor_of(difference, part)
        if part is not None and factor and close(difference, factor * part, value.rounding):
            count = round(1.0 + factor, 6)
            return f"the {name} is {'not added' if not count else f'counted {count:g} times'} in it"
    return None


# ---- the same elements in another order


def _shifted(value: LocalValue, trace: Trace) -> str | None:
    size = value.observed.shape[TOKENS]
    whole = value.observed.ndim > 2 and value.index[TOKENS].ndim == 1 and size == value.full.shape[TOKENS]
    for shift in (sign * k for k in range(1, size - 1 if whole else 0) for sign in (1, -1)):
        here, there = slice(max(0, -shift), size - max(0, shift)), slice(max(0, shift), size + min(0, shift))
        if close(value.observed[:, here], value.expected[:, there], value.rounding):
            return f"each token has the value of the token {abs(shift)} {'later' if shift > 0 else 'earlier'}"
    return None


def _exchanged(value: LocalValue, trace: Trace) -> str | None:
    """Recognise samples, heads, tokens or features in another order, or some that are there several times."""
    num_dims = value.observed.ndim
    for dim, least_dims, whose, what in (
        (0, 2, "samples", "row"), (2, 4, "heads", "head"), (TOKENS, 3, "tokens", "position"),
    ):  # fmt: skip
        if num_dims < least_dims:
            continue
        order = _tokens(value) if dim == TOKENS else _permutation(value.observed, value.expected, dim=dim)
        if order is not None:
            orders = context_orders(value, trace) if dim == TOKENS else ()
            named = next((words for words, places in orders if np.array_equal(order, places)), None)
            return named or _order_words(whose, what, order)
    order = _permutation(value.observed, value.expected, dim=num_dims - 1)
    if order is None:
        return None
    for parts in (2, 3, 4, 6):  # a layer that returns several things at once
        blocks = order.reshape(parts, -1) if len(order) % parts == 0 else order[:1, None]
        starts, size = blocks[:, 0], blocks.shape[1]
        if size > 2 and (np.diff(blocks, axis=1) == 1).all() and not (starts % size).any():
            return _order_words("features", "equal part", starts // size)
    return _order_words("features", "feature", order)


def _tokens(value: LocalValue) -> Places | None:
    """Return the positions of the tokens that a value holds instead of its own, in its shard or the full value."""
    order, own = _permutation(value.observed, value.expected, dim=TOKENS), value.index[TOKENS]
    if order is None and own.ndim == 1 and value.full.shape[TOKENS] > len(own):
        others = take(value.full, (value.index[0], np.arange(value.full.shape[TOKENS]), *value.index[2:]))
        return _permutation(value.observed, others, dim=TOKENS)
    return order if order is None or own.ndim > 1 else own[order]


def _permutation(a: Array, b: Array, *, dim: int) -> Places | None:
    """Return the slices of `b` that `a` has along a dim, its own where it can be."""
    if a.shape[dim] < 2:
        return None
    rows_a, rows_b = (np.moveaxis(x, dim, 0).reshape(x.shape[dim], -1) for x in (a, b))
    scale, order = float(np.abs(rows_b).max(initial=0.0)), []
    for place, row in enumerate(rows_a):
        distance = np.abs(rows_b - row).max(axis=1)
        if not distance.min() <= ROUNDING * scale:
            return None
        is_own = len(rows_a) == len(rows_b) and distance[place] <= ROUNDING * scale
        order.append(place if is_own else int(distance.argmin()))
    return None if order == list(range(len(rows_b))) else np.array(order)


def _order_words(whose: str, what: str, order: Places) -> str:
    """Say in which order the slices of a dim are; what is there twice is not exchanged."""
    num = len(set(order.tolist()))
    if num == len(order):
        they = "they" if whose == f"{what}s" else f"{what}s"
        return f"{whose} are exchanged: {they} are in the order {index_words(order.tolist())}"
    if num == 1:
        return f"all {what}s have the value of {what} {order[0]}"
    return f"{what}s have the values of {what}s {index_words(order.tolist())}"


def context_orders(value: LocalValue, trace: Trace) -> Iterator[tuple[str, Places]]:
    """Yield wrong orders of the tokens of a context-parallel rank: what it is called, and their positions."""
    own, rank = [np.asarray(one) for one in trace.tokens.get(value.cell, [])], coordinates(trace.axes)[value.rank]["cp"]
    if len(own) < 2 or any(one.ndim > 1 for one in own):
        return
    size, mine = len(own[rank]), own[rank]
    for other, places in enumerate(own):
        if other != rank:
            yield f"cp rank {rank} holds the tokens of cp rank {other}, which are there twice", places
    contiguous = np.arange(size) + rank * size
    yield "tokens are in a contiguous order over cp, not that of masks and positions", contiguous
    yield "tokens are in a reversed order of the cp rank's tokens", mine[::-1]
    yield "tokens are in an order of the cp rank's tokens with its halves swapped", np.roll(mine, -(size // 2))


# ---- rotary embedding


def _rotated(value: LocalValue, trace: Trace) -> str | None:
    """Recognise rotary embedding at other positions: each pair (x[i], x[i + h/2]) is rotated by a further angle."""
    if value.observed.ndim != 4 or value.observed.shape[-1] % 2:
        return None
    if _is_unrotated(value, trace):
        return "it is not rotated: RoPE is not applied"
    a, b = (x[..., : x.shape[-1] // 2] + 1j * x[..., x.shape[-1] // 2 :] for x in (value.observed, value.expected))
    if not close(np.abs(a), np.abs(b)):
        return None
    steps_bt = _steps(a[..., 0], b[..., 0], 4 * value.observed.shape[1])
    if steps_bt is not None:
        if named := _name_positions(steps_bt, value, trace):
            return named
        steps = sorted({int(step) for step in steps_bt.flat})
        if len(steps) == 1 and steps[0]:
            return f"RoPE uses positions that are {abs(steps[0])} too {'large' if steps[0] > 0 else 'small'}"
        if len(steps) > 1:
            return f"RoPE uses other positions: off by {index_words(steps)}"
    return "it is rotated by other angles: RoPE has another base, scaling or pairing, or other positions"


def _is_unrotated(value: LocalValue, trace: Trace) -> bool:
    """Return whether queries or keys are still what their projection returns."""
    projection = {"queries": "wq", "keys": "wk"}.get(value.what)
    full = trace.reference[value.cell].get(f"output of {value.module.removesuffix('.core')}.{projection}")
    if full is None or full.size != value.full.size:
        return False
    return close(value.observed, take(full.reshape(value.full.shape), value.index), value.rounding)


def _steps(a_btn: npt.NDArray[np.complex128], b_btn: npt.NDArray[np.complex128], most: int) -> Places | None:
    """Return by how many positions tokens are off, given the first pair of features, which turns by one radian per
    position; None if angles are no multiples of it."""
    strong = np.abs(b_btn) > 1e-3 * np.abs(b_btn).max()
    turn_bt = np.nanmedian(np.where(strong, np.angle(a_btn * np.conj(b_btn)), np.nan), axis=2)
    steps = np.array(sorted(range(1 - most, most), key=lambda step: step % (2 * np.pi)))
    nearest_bt = np.searchsorted(steps % (2 * np.pi), turn_bt % (2 * np.pi) - SAME_ANGLE) % len(steps)
    off_bt = (turn_bt - steps[nearest_bt] + np.pi) % (2 * np.pi) - np.pi
    return steps[nearest_bt] if bool((np.abs(off_bt) < SAME_ANGLE).all()) else None


def _name_positions(steps_bt: Places, value: LocalValue, trace: Trace) -> str | None:
    """Name positions that are off by steps: those of places in the shard, of consecutive tokens, or of samples."""
    layout = trace.source.layouts[value.cell]
    if layout is None:
        return None
    tokens = np.broadcast_to(value.index[TOKENS], steps_bt.shape)
    due_bt = np.broadcast_to(positions(layout.documents, layout.seq_len).numpy(), (len(tokens), layout.seq_len))
    found_bt, places = np.take_along_axis(due_bt, tokens, 1) + steps_bt, np.arange(tokens.shape[1])
    if np.array_equal(found_bt, tokens) and layout.documents is not None:
        return "RoPE uses positions in the sample: they don't start again in each document"
    if layout.documents is not None:
        for which, documents in _other_documents(value, trace):
            other_bt = np.broadcast_to(positions(documents, layout.seq_len).numpy(), due_bt.shape)
            if np.array_equal(np.take_along_axis(other_bt, tokens, 1), found_bt):
                return f"RoPE uses positions in the documents of {which}"
    if tokens.shape[1] == layout.seq_len:
        return None
    if (found_bt == places).all():
        return "RoPE uses local positions: places in the cp rank's shard instead of positions in the sample"
    if (found_bt == places + coordinates(trace.axes)[value.rank]["cp"] * len(places)).all():
        return "RoPE uses positions of consecutive tokens, but the cp ranks hold the tokens in a balanced order"
    return None


def _other_documents(value: LocalValue, trace: Trace) -> Iterator[tuple[str, Documents]]:
    """Yield documents of another sample or micro-batch, and whose they are."""
    own, number = trace.source.layouts[value.cell], value.cell % trace.num_microbatches
    if own is not None and own.documents is not None:
        yield "the first sample of the micro-batch", (own.documents[0],) * len(own.documents)
    for cell in range(value.cell - number, value.cell - number + trace.num_microbatches):
        other = trace.source.layouts[cell]
        if cell != value.cell and other is not None and other.documents is not None:
            yield f"micro-batch {cell % trace.num_microbatches}: a stale buffer", other.documents


# ---- norms, biases and rounding


def _per_token(value: LocalValue, trace: Trace) -> str | None:
    if value.observed.ndim < 3 or value.observed.shape[-1] < 4:
        return None
    factor = token_factors(value.observed, value.expected)
    low, high = float(factor.min()), float(factor.max())
    if high - low < APART or not close(value.observed, factor * value.expected):
        return None
    words = f"each token has a factor of its own, {low:.4g} … {high:.4g}"
    if "norm" in type(trace.module(value.module)).__name__.lower():
        return _epsilon(value, trace, factor) or f"{words}: another statistic of the norm, or its epsilon"
    some = factor[np.abs(factor - high) > 1e-6 * abs(high)]
    if len(some) and np.abs(some).max() < 1e-9:
        whose = "samples" if (np.ptp(factor, axis=1) < 1e-6).all() else "tokens"
        left = "" if abs(high - 1.0) < 1e-6 else ", and the others scaled, as by stochastic depth"
        return f"some {whose} are dropped{left}: factors 0 and {high:.4g}"
    return words


def _epsilon(value: LocalValue, trace: Trace, factor: Array) -> str | None:
    """Solve for the epsilon of a norm whose tokens are scaled: (s + ε') · factor² = s + ε.

    Here s is the mean square, or a LayerNorm's variance.
    """
    norm, before = trace.module(value.module), trace.at(value, f"input of {value.module}")
    given = (getattr(norm, name, None) for name in ("eps", "variance_epsilon"))
    epsilon = next((one for one in given if isinstance(one, float)), None)
    if value.what != "output" or epsilon is None or before is None:
        return None
    centred = before - before.mean(-1, keepdims=True) if isinstance(norm, nn.LayerNorm) else before
    square = (centred * centred).mean(-1, keepdims=True)
    found = (square + epsilon) / factor**2 - square
    mid = float(np.median(found))
    is_one = np.abs(found - mid).max() <= 1e-3 * max(abs(mid), epsilon)
    return f"the norm's epsilon is {mid:.3g} instead of {epsilon:.3g}" if is_one else None


def _offset(value: LocalValue, trace: Trace) -> str | None:
    difference = value.observed - value.expected
    rows = difference.reshape(-1, difference.shape[-1])
    same = len(rows) > 1 and close(rows, np.broadcast_to(rows[:1], rows.shape))
    return "it is off by the same vector at every token: a bias is missing or added twice" if same else None


def _rounded(value: LocalValue, trace: Trace) -> str | None:
    """Recognise a value that is rounded to a narrower dtype, or computed in one, by the size of its error."""
    for dtype, unit in (("float32", 2.0**-24), ("bfloat16", 2.0**-9)):
        if not unit / LEAST_ROUNDINGS <= value.error <= MOST_ROUNDINGS * unit:
            continue
        x, is_float32 = value.observed, dtype == "float32"
        if bool((x.astype(np.float32) == x if is_float32 else is_bfloat16(x)).all()):
            return f"it is rounded to {dtype}: part of the computation runs in {dtype}, the difference is its rounding"
        if is_float32 and value.error <= MOST_ROUNDINGS / 4 * unit and _is_rounding(value, unit):
            return f"part of the computation runs in {dtype}: the difference is its rounding"
    return None


def _is_rounding(value: LocalValue, unit: float) -> bool:
    """Return whether a difference makes values larger about as often as smaller, in proportion to them."""
    difference, expected = (value.observed - value.expected)[value.wrong], value.expected[value.wrong]
    if difference.size < LEAST_SIGNS or abs(float(np.sign(difference * expected).mean())) > MOST_BIAS:
        return False
    return float(np.median(np.abs(difference) / np.maximum(np.abs(expected), TINY))) > LEAST_MEDIAN * unit


RELATIONS: tuple[Relation, ...] = (
    _not_finite, _multiple, _of_another_cell, _skipped, _of_another_layer, _rotated, _shifted, _exchanged, _per_token,
    _offset, _residual, _part, _rounded,
)  # fmt: skip
"""Relations in the order in which they are tried, special ones first."""
