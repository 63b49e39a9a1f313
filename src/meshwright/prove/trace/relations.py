"""How a wrong value is related to the right one: scaled, shifted, rotated, exchanged, another layer's, …

Each relation is a function of a value on one rank, and returns words if it explains all of its elements up to rounding.

Shapes: b samples, t tokens, n heads, h head_dim; a value is [b, t, …].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from torch import nn

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


def close(a: Array, b: Array, rounding: float = ROUNDING) -> bool:
    """Return whether two arrays are equal up to rounding."""
    if a.shape != b.shape:
        return False
    scale = max(float(np.abs(b).max(initial=0.0)), float(np.abs(a).max(initial=0.0)))
    with np.errstate(invalid="ignore", over="ignore"):
        return bool(np.abs(a - b).max(initial=0.0) <= rounding * scale)


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


def _zero(value: LocalValue, trace: Trace) -> str | None:
    return None if value.observed.any() else "it is zero"


def _multiple(value: LocalValue, trace: Trace) -> str | None:
    factor = factor_of(value.observed, value.expected)
    is_multiple = close(value.observed, factor * value.expected, value.rounding)
    return f"it is {number_words(factor)} × the right one" if is_multiple else None


def factor_of(a: Array, b: Array) -> float:
    """Return the c for which c · b is nearest to a; 0 if b is zero."""
    energy = float(np.vdot(b, b))
    return float(np.vdot(b, a)) / energy if energy else 0.0


def _of_another_cell(value: LocalValue, trace: Trace) -> str | None:
    home = divmod(value.cell, trace.num_microbatches)
    for cell, values in enumerate(trace.reference):
        if cell != value.cell and value.name in values and _is(value, values[value.name]):
            dp_rank, microbatch = divmod(cell, trace.num_microbatches)
            whose = "" if dp_rank == home[0] else f" of data-parallel rank {dp_rank}"
            return (
                f"micro-batch {home[1]} has the value of micro-batch {microbatch}{whose}: a stale or exchanged buffer"
            )
    return None


def _skipped(value: LocalValue, trace: Trace) -> str | None:
    what, _, module = value.name.partition(" of ")
    name = f"input of {module}"
    if module == MODEL:  # the last module's output
        name = [one for one in trace.reference[value.cell] if one.startswith("output of ")][-2]
    before = trace.reference[value.cell].get(name)
    if what != "output" or before is None or not _is(value, before):
        return None
    return f"it is the {name}: " + ("nothing is done to it after" if module == MODEL else "the module does nothing")


def _of_another_layer(value: LocalValue, trace: Trace) -> str | None:
    own = LAYER.search(value.name)
    for name, full in trace.reference[value.cell].items() if own else ():
        other = LAYER.search(name)
        if other and other[1] != own[1] and LAYER.sub(own[0], name, count=1) == value.name and _is(value, full):  # type: ignore[index]
            return f"it is the {name}: layers are exchanged"
    return None


def _is(value: LocalValue, full: Array) -> bool:
    return full.shape == value.full.shape and close(value.observed, take(full, value.index), value.rounding)


def _samples(value: LocalValue, trace: Trace) -> str | None:
    order = _permutation(value.observed, value.expected, dim=0)
    return None if order is None else _exchanged("samples", "row", order)


def _exchanged(whose: str, what: str, order: Places) -> str:
    """Say in which order the slices of a dim are; what is there twice is not exchanged."""
    if len(set(order.tolist())) == len(order):
        they = "they" if whose == f"{what}s" else f"{what}s"
        return f"{whose} are exchanged: {they} are in the order {index_words(order.tolist())}"
    if len(set(order.tolist())) == 1:
        return f"all {what}s have the value of {what} {order[0]}"
    return f"{what}s have the values of {what}s {index_words(order.tolist())}"


def _shifted(value: LocalValue, trace: Trace) -> str | None:
    if (
        value.observed.ndim < 3
        or value.index[TOKENS].ndim > 1
        or value.observed.shape[TOKENS] < value.full.shape[TOKENS]
    ):
        return None
    size = value.observed.shape[TOKENS]
    for shift in (sign * k for k in range(1, size) for sign in (1, -1)):
        a, b = (slice(shift, None), slice(None, -shift)) if shift > 0 else (slice(None, shift), slice(-shift, None))
        if size - abs(shift) < 2:
            break
        if close(value.observed[:, b], value.expected[:, a], value.rounding):
            where = "later" if shift > 0 else "earlier"
            return f"each token has the value of the token {abs(shift)} {where}"
    return None


def _tokens(value: LocalValue, trace: Trace) -> str | None:
    """Recognise tokens of other places, in the shard or in the full value; with cp, of which rank and in what order."""
    if value.observed.ndim < 3:
        return None
    order = _permutation(value.observed, value.expected, dim=TOKENS)
    own = value.index[TOKENS]
    if order is None and own.ndim == 1 and value.full.shape[TOKENS] > len(own):
        others = take(value.full, (value.index[0], np.arange(value.full.shape[TOKENS]), *value.index[2:]))
        order = _permutation(value.observed, others, dim=TOKENS)
    elif order is not None and own.ndim == 1:
        order = own[order]
    if order is None:
        return None
    named = name_order(order, value, trace)
    return named or _exchanged("tokens", "position", order)


def name_order(order: Places, value: LocalValue, trace: Trace) -> str | None:
    """Name tokens of a context-parallel rank that are read from other positions, given the positions."""
    own, rank = [np.asarray(one) for one in trace.tokens.get(value.cell, [])], coordinates(trace.axes)[value.rank]["cp"]
    if len(own) < 2 or any(one.ndim > 1 for one in own) or len(order) != len(own[rank]):
        return None
    size, mine = len(order), own[rank]
    for other, places in enumerate(own):
        if other != rank and np.array_equal(order, places):
            return f"cp rank {rank} holds the tokens of cp rank {other}, which are there twice"
    for places, what in (
        (np.arange(size) + rank * size, "a contiguous order over cp, not that of masks and positions"),
        (mine[::-1], "a reversed order of the cp rank's tokens"),
        (np.roll(mine, -(size // 2)), "an order of the cp rank's tokens with its halves swapped"),
    ):
        if np.array_equal(order, places):
            return f"tokens are in {what}"
    return None


def _heads(value: LocalValue, trace: Trace) -> str | None:
    if value.observed.ndim != 4:
        return None
    order = _permutation(value.observed, value.expected, dim=2)
    return None if order is None else _exchanged("heads", "head", order)


def _features(value: LocalValue, trace: Trace) -> str | None:
    order = _permutation(value.observed, value.expected, dim=value.observed.ndim - 1)
    if order is None:
        return None
    for parts in (2, 3, 4, 6):  # a layer that returns several things at once
        blocks = order.reshape(parts, -1) if len(order) % parts == 0 else order[:1, None]
        starts, size = blocks[:, 0], blocks.shape[1]
        if size > 2 and (np.diff(blocks, axis=1) == 1).all() and not (starts % size).any():
            return _exchanged("features", "equal part", starts // size)
    return _exchanged("features", "feature", order)


def _transposed(value: LocalValue, trace: Trace) -> str | None:
    is_transposed = value.observed.ndim > 3 and _is(value, value.full.swapaxes(-1, -2))
    return "its last two dims are exchanged" if is_transposed else None


def _permutation(a: Array, b: Array, *, dim: int) -> Places | None:
    """Return the slices of `b` that `a` has along a dim, its own where it can be."""
    if a.ndim <= dim or a.shape[dim] < 2 or b.ndim != a.ndim:
        return None
    rows_a, rows_b = (np.moveaxis(x, dim, 0).reshape(x.shape[dim], -1) for x in (a, b))
    if rows_a.shape[1] != rows_b.shape[1]:
        return None
    scale, order = float(np.abs(rows_b).max(initial=0.0)), []
    for place, row in enumerate(rows_a):
        distance = np.abs(rows_b - row).max(axis=1)
        if not distance.min() <= ROUNDING * scale:
            return None
        is_own = len(rows_a) == len(rows_b) and distance[place] <= ROUNDING * scale
        order.append(place if is_own else int(distance.argmin()))
    return None if order == list(range(len(rows_b))) else np.array(order)


def _rotated(value: LocalValue, trace: Trace) -> str | None:
    """Recognise rotary embedding at other positions: each pair (x[i], x[i + h/2]) is rotated by a further angle."""
    if value.observed.ndim != 4 or value.observed.shape[-1] % 2:
        return None
    a, b = (_complex(x) for x in (value.observed, value.expected))
    if not close(np.abs(a), np.abs(b)):
        return None
    strong = np.abs(b) > 1e-3 * np.abs(b).max()
    angle = np.angle(a * np.conj(b))
    fast = np.where(strong[..., 0], angle[..., 0], np.nan)  # the first pair turns by one radian per position
    turn_bt = np.nanmedian(fast, axis=2) if fast.size else fast
    moved = [_steps(float(turn), value.observed.shape[1] * 4) for turn in turn_bt.reshape(-1) if np.isfinite(turn)]
    if moved and len(moved) == turn_bt.size and all(step is not None for step in moved):
        steps_bt = np.array(moved, dtype=np.int64).reshape(turn_bt.shape)
        if named := _name_positions(steps_bt, value, trace):
            return named
        steps = sorted({int(step) for step in steps_bt.flat})
        if len(steps) == 1 and steps[0]:
            return f"RoPE uses positions that are {abs(steps[0])} too {'large' if steps[0] > 0 else 'small'}"
        if len(steps) > 1:
            return f"RoPE uses other positions: off by {index_words(steps)}"
    return "it is rotated by other angles: RoPE has another base, scaling or pairing, or other positions"


def _name_positions(steps_bt: Places, value: LocalValue, trace: Trace) -> str | None:
    """Name positions that are off by steps: those of places in the shard, of consecutive tokens, or of samples."""
    layout = None if trace.source is None else trace.source.layouts[value.cell]
    if layout is None:
        return None
    tokens = np.broadcast_to(value.index[TOKENS], steps_bt.shape)
    due_bt = np.broadcast_to(positions(layout.documents, layout.seq_len).numpy(), (len(tokens), layout.seq_len))
    found_bt, places = np.take_along_axis(due_bt, tokens, 1) + steps_bt, np.arange(tokens.shape[1])
    if np.array_equal(found_bt, tokens) and layout.documents is not None:
        return "RoPE uses positions in the sample: they don't start again in each document"
    if tokens.shape[1] == layout.seq_len:
        return None
    if (found_bt == places).all():
        return "RoPE uses local positions: places in the cp rank's shard instead of positions in the sample"
    if (found_bt == places + coordinates(trace.axes)[value.rank]["cp"] * len(places)).all():
        return "RoPE uses positions of consecutive tokens, but the cp ranks hold the tokens in a balanced order"
    return None


def _complex(x_btnh: Array) -> npt.NDArray[np.complex128]:
    first, second = np.split(x_btnh, 2, axis=-1)
    return first + 1j * second


def _steps(turn: float, most: int) -> int | None:
    """Return how many positions an angle in (−π, π] turns by, at one radian each; None if not an integer."""
    for step in (sign * k for k in range(most) for sign in (1, -1)):
        if abs((turn - step + np.pi) % (2 * np.pi) - np.pi) < 1e-7:
            return step
    return None


def _unrotated(value: LocalValue, trace: Trace) -> str | None:
    module = value.name.partition(" of ")[2].removesuffix(".core")
    projection = {"queries": "wq", "keys": "wk"}.get(value.name.partition(" ")[0])
    name = f"output of {module}.{projection}"
    full = trace.reference[value.cell].get(name)
    if projection is None or full is None:
        return None
    plain = full.reshape(*full.shape[:2], -1, value.observed.shape[-1])
    return "it is not rotated: RoPE is not applied" if _is(value, plain) else None


APART = 1e-3
"""Least difference between the factors of tokens; less may be rounding."""


def _per_token(value: LocalValue, trace: Trace) -> str | None:
    if value.observed.ndim < 3 or value.observed.shape[-1] < 4:
        return None
    a, b = value.observed, value.expected
    energy = np.maximum((b * b).sum(-1, keepdims=True), 1e-300)
    factor = (a * b).sum(-1, keepdims=True) / energy
    if not close(a, factor * b):
        return None
    low, high = float(factor.min()), float(factor.max())
    if high - low < APART:
        return None
    words = f"each token has a factor of its own, {low:.4g} … {high:.4g}"
    if "norm" in type(trace.module(value.name.rpartition(" of ")[2])).__name__.lower():
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
    what, _, module = value.name.partition(" of ")
    norm, before = trace.module(module), trace.reference[value.cell].get(f"input of {module}")
    given = (getattr(norm, name, None) for name in ("eps", "variance_epsilon"))
    epsilon = next((one for one in given if isinstance(one, float)), None)
    if what != "output" or epsilon is None or before is None or before.shape != value.full.shape:
        return None
    centred = before - before.mean(-1, keepdims=True) if isinstance(norm, nn.LayerNorm) else before
    square = take((centred * centred).mean(-1, keepdims=True), (*value.index[:-1], np.arange(1)))
    found = (square + epsilon) / factor**2 - square
    mid = float(np.median(found))
    is_one = np.abs(found - mid).max() <= 1e-3 * max(abs(mid), epsilon)
    return f"the norm's epsilon is {mid:.3g} instead of {epsilon:.3g}" if is_one else None


def _offset(value: LocalValue, trace: Trace) -> str | None:
    difference = value.observed - value.expected
    rows = difference.reshape(-1, difference.shape[-1])
    same = len(rows) > 1 and close(rows, np.broadcast_to(rows[:1], rows.shape))
    return "it is off by the same vector at every token: a bias is missing or added twice" if same else None


def _residual(value: LocalValue, trace: Trace) -> str | None:
    """Recognise a branch that is scaled before it is added: observed − start = factor · (expected − start).

    The start is a block's input, or what an adapter's base returns.
    """
    what, _, module = value.name.partition(" of ")
    for name, words in (
        (f"output of {module}.base_layer", "the adapter's part of {} is {} × what it should be"),
        (f"input of {module}", "{} adds {} × what it should to its input"),
    ):
        before = trace.reference[value.cell].get(name)
        if what != "output" or before is None or before.shape != value.full.shape:
            continue
        start = take(before, value.index)
        added = value.expected - start
        factor = factor_of(value.observed - start, added)
        if close(value.observed, start + factor * added, value.rounding):
            return words.format(module, number_words(factor))
    return None


def _part(value: LocalValue, trace: Trace) -> str | None:
    """Recognise a gradient that lacks what one of the modules within returns, or counts it more than once."""
    what, _, module = value.name.removeprefix(GRADIENT).partition(" of ")
    if what != "input" or not value.name.startswith(GRADIENT):
        return None
    difference = value.observed - value.expected
    for name, full in trace.reference[value.cell].items():
        if name.startswith(f"{value.name}.") and full.shape == value.full.shape:
            part = take(full, value.index)
            factor = factor_of(difference, part)
            if factor and close(difference, factor * part, value.rounding):
                count = round(1.0 + factor, 6)
                return f"the {name} is {'not added' if not count else f'counted {count:g} times'} in it"
    return None


def _rounded(value: LocalValue, trace: Trace) -> str | None:
    """Recognise a value that is rounded to a narrower dtype, or computed in one, by the size of its error."""
    for dtype, unit, kind in (("float32", 2.0**-24, np.float32), ("bfloat16", 2.0**-9, None)):
        if not unit / LEAST_ROUNDINGS <= value.error <= MOST_ROUNDINGS * unit:
            continue
        numbers = is_bfloat16(value.observed) if kind is None else value.observed.astype(kind) == value.observed
        if bool(numbers.all()):
            return f"it is rounded to {dtype}: part of the computation runs in {dtype}, the difference is its rounding"
        if value.error <= MOST_ROUNDINGS / 4 * unit and dtype == "float32" and _is_rounding(value, unit):
            return f"part of the computation runs in {dtype}: the difference is its rounding"
    return None


def _is_rounding(value: LocalValue, unit: float) -> bool:
    """Return whether a difference makes values larger about as often as smaller, in proportion to them."""
    difference, expected = (value.observed - value.expected)[value.wrong], value.expected[value.wrong]
    if difference.size < LEAST_SIGNS or abs(float(np.sign(difference * expected).mean())) > MOST_BIAS:
        return False
    return float(np.median(np.abs(difference) / np.maximum(np.abs(expected), TINY))) > LEAST_MEDIAN * unit


RELATIONS: tuple[Relation, ...] = (
    _not_finite, _zero, _multiple, _of_another_cell, _skipped, _of_another_layer, _samples, _unrotated, _rotated,
    _heads, _shifted, _tokens, _per_token, _offset, _residual, _part, _features, _transposed, _rounded,
)  # fmt: skip
"""Relations in the order in which they are tried, special ones first."""


def parts_of(values: tuple[LocalValue, ...]) -> Iterator[tuple[int, Places, int]]:
    """Yield per dim the places in the full value at which any rank differs, and the size of the dim."""
    for dim in range(values[0].observed.ndim):
        places: set[int] = set()
        for value in values:
            wrong = np.moveaxis(value.wrong, dim, -1)
            at = value.index[dim]
            if at.ndim == 1:
                places |= {int(place) for place in at[wrong.reshape(-1, wrong.shape[-1]).any(0)]}
            else:
                per_sample = wrong.reshape(wrong.shape[0], -1, wrong.shape[-1]).any(1)
                places |= {int(place) for place in at[per_sample]}
        yield dim, np.array(sorted(places), dtype=np.int64), values[0].full.shape[dim]
