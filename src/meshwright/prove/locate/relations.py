"""How a wrong value is related to the right one: scaled, shifted, rotated, exchanged, another layer's, …

Each relation is a function of a value on one rank, and returns words if it explains all of its elements up to rounding.

Shapes: b samples, t tokens, n heads, h head_dim; a value is [b, t, …].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from meshwright.prove.compare.tensor_shards import Array
from meshwright.prove.diagnose.phrases import index_words, number_words
from meshwright.prove.locate.first_difference import TOKENS, Forward, LocalValue, Places, take

ROUNDING = 1e-9
"""Relative difference up to which a relation explains a value."""
LAYER = re.compile(r"\.(\d+)(?=\.|$)")
"""Number of a layer in a module's name."""
Relation = Callable[[LocalValue, Forward], str | None]


def close(a: Array, b: Array) -> bool:
    """Return whether two arrays are equal up to rounding."""
    if a.shape != b.shape:
        return False
    scale = max(float(np.abs(b).max(initial=0.0)), float(np.abs(a).max(initial=0.0)))
    with np.errstate(invalid="ignore", over="ignore"):
        return bool(np.abs(a - b).max(initial=0.0) <= ROUNDING * scale)


def explain(values: tuple[LocalValue, ...], forward: Forward) -> str | None:
    """Return the first relation that holds on all ranks and in all micro-batches, in words; None if there is none."""
    for relation in RELATIONS:
        words: list[str] = []
        for value in values:
            found = relation(value, forward)
            if found is None:
                break
            words += [found] if found not in words else []
        else:
            more = f", and {len(words) - 2} more" if len(words) > 2 else ""
            return "; ".join(words[:2]) + more
    return None


def _not_finite(value: LocalValue, forward: Forward) -> str | None:
    return None if np.isfinite(value.observed).all() else "it has NaN or infinite entries"


def _zero(value: LocalValue, forward: Forward) -> str | None:
    return None if value.observed.any() else "it is zero"


def _multiple(value: LocalValue, forward: Forward) -> str | None:
    factor = _factor(value.observed, value.expected)
    return f"it is {number_words(factor)} × the right one" if close(value.observed, factor * value.expected) else None


def _factor(a: Array, b: Array) -> float:
    """Return the c for which c · b is nearest to a; 0 if b is zero."""
    energy = float(np.vdot(b, b))
    return float(np.vdot(b, a)) / energy if energy else 0.0


def _of_another_cell(value: LocalValue, forward: Forward) -> str | None:
    home = divmod(value.cell, forward.num_microbatches)
    for cell, values in enumerate(forward.reference):
        if cell != value.cell and value.name in values and _is(value, values[value.name]):
            dp_rank, microbatch = divmod(cell, forward.num_microbatches)
            whose = "" if dp_rank == home[0] else f" of data-parallel rank {dp_rank}"
            return f"micro-batch {home[1]} has the value of micro-batch {microbatch}{whose}"
    return None


def _skipped(value: LocalValue, forward: Forward) -> str | None:
    what, _, module = value.name.partition(" of ")
    before = forward.reference[value.cell].get(f"input of {module}")
    if what != "output" or before is None or before.shape != forward.reference[value.cell][value.name].shape:
        return None
    return f"it is the input of {module}: the module does nothing" if _is(value, before) else None


def _of_another_layer(value: LocalValue, forward: Forward) -> str | None:
    own = LAYER.search(value.name)
    for name, full in forward.reference[value.cell].items() if own else ():
        other = LAYER.search(name)
        if other and other[1] != own[1] and LAYER.sub(own[0], name, count=1) == value.name and _is(value, full):  # type: ignore[index]
            return f"it is the {name}: layers are exchanged"
    return None


def _is(value: LocalValue, full: Array) -> bool:
    return full.shape == value.full_shape and close(value.observed, take(full, value.index))


def _samples(value: LocalValue, forward: Forward) -> str | None:
    order = _permutation(value.observed, value.expected, dim=0)
    return None if order is None else f"samples are exchanged: the micro-batch's rows are in the order {order}"


def _shifted(value: LocalValue, forward: Forward) -> str | None:
    if value.observed.ndim < 3:
        return None
    size = value.observed.shape[TOKENS]
    for shift in (sign * k for k in range(1, size) for sign in (1, -1)):
        a, b = (slice(shift, None), slice(None, -shift)) if shift > 0 else (slice(None, shift), slice(-shift, None))
        if size - abs(shift) < 2:
            break
        if close(value.observed[:, b], value.expected[:, a]):
            where = "later" if shift > 0 else "earlier"
            return f"each token has the value of the token {abs(shift)} {where}"
    return None


def _tokens(value: LocalValue, forward: Forward) -> str | None:
    order = _permutation(value.observed, value.expected, dim=TOKENS)
    return None if order is None else f"tokens are exchanged: they are in the order {order}"


def _heads(value: LocalValue, forward: Forward) -> str | None:
    if value.observed.ndim != 4:
        return None
    order = _permutation(value.observed, value.expected, dim=2)
    return None if order is None else f"heads are exchanged: they are in the order {order}"


def _features(value: LocalValue, forward: Forward) -> str | None:
    order = _permutation(value.observed, value.expected, dim=value.observed.ndim - 1)
    return None if order is None else f"features are exchanged: they are in the order {order}"


def _permutation(a: Array, b: Array, *, dim: int) -> str | None:
    """Return the slices of `b` that `a` has along a dim, if they are a mapping other than the identity."""
    if a.ndim <= dim or a.shape[dim] < 2 or a.shape != b.shape:
        return None
    rows_a, rows_b = (np.moveaxis(x, dim, 0).reshape(x.shape[dim], -1) for x in (a, b))
    scale, order = float(np.abs(rows_b).max()), []
    for row in rows_a:
        distance = np.abs(rows_b - row).max(axis=1)
        if distance.min() > ROUNDING * scale:
            return None
        order.append(int(distance.argmin()))
    return index_words(order)


def _rotated(value: LocalValue, forward: Forward) -> str | None:
    """Rotary embedding at other positions: each pair (x[i], x[i + h/2]) is rotated by a further angle."""
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
    if moved and all(step is not None for step in moved):
        steps = sorted({int(step) for step in moved if step is not None})
        if len(steps) == 1 and steps[0]:
            return f"RoPE uses positions that are {abs(steps[0])} too {'large' if steps[0] > 0 else 'small'}"
        if len(steps) > 1:
            return f"RoPE uses other positions: off by {index_words(steps)}"
    return "it is rotated by other angles: RoPE has another base, scaling or pairing, or other positions"


def _complex(x_btnh: Array) -> npt.NDArray[np.complex128]:
    first, second = np.split(x_btnh, 2, axis=-1)
    return first + 1j * second


def _steps(turn: float, most: int) -> int | None:
    """Return how many positions an angle in (−π, π] turns by, at one radian each; None if not an integer."""
    for step in (sign * k for k in range(most) for sign in (1, -1)):
        if abs((turn - step + np.pi) % (2 * np.pi) - np.pi) < 1e-7:
            return step
    return None


def _unrotated(value: LocalValue, forward: Forward) -> str | None:
    module = value.name.partition(" of ")[2].removesuffix(".core")
    projection = {"queries": "wq", "keys": "wk"}.get(value.name.partition(" ")[0])
    name = f"output of {module}.{projection}"
    full = forward.reference[value.cell].get(name)
    if projection is None or full is None:
        return None
    plain = full.reshape(*full.shape[:2], -1, value.observed.shape[-1])
    return "it is not rotated: RoPE is not applied" if _is(value, plain) else None


def _per_token(value: LocalValue, forward: Forward) -> str | None:
    if value.observed.ndim < 3 or value.observed.shape[-1] < 4:
        return None
    a, b = value.observed, value.expected
    energy = np.maximum((b * b).sum(-1, keepdims=True), 1e-300)
    factor = (a * b).sum(-1, keepdims=True) / energy
    if not close(a, factor * b):
        return None
    low, high = float(factor.min()), float(factor.max())
    return _epsilon(value, forward, factor) or (
        f"each token has a factor of its own, {low:.4g} … {high:.4g}: another statistic of the norm, or its epsilon"
    )


def _epsilon(value: LocalValue, forward: Forward, factor: Array) -> str | None:
    """Solve for the epsilon of an RMS norm whose tokens are scaled: (mean square + ε') · factor² = mean square + ε."""
    what, _, module = value.name.partition(" of ")
    epsilon, before = forward.epsilons.get(module), forward.reference[value.cell].get(f"input of {module}")
    if what != "output" or epsilon is None or before is None or before.shape != value.full_shape:
        return None
    mean_square = take((before * before).mean(-1, keepdims=True), (*value.index[:-1], np.arange(1)))
    found = (mean_square + epsilon) / factor**2 - mean_square
    mid = float(np.median(found))
    is_one = np.abs(found - mid).max() <= 1e-3 * max(abs(mid), epsilon)
    return f"the norm's epsilon is {mid:.3g} instead of {epsilon:.3g}" if is_one else None


def _offset(value: LocalValue, forward: Forward) -> str | None:
    difference = value.observed - value.expected
    rows = difference.reshape(-1, difference.shape[-1])
    same = len(rows) > 1 and close(rows, np.broadcast_to(rows[:1], rows.shape))
    return "it is off by the same vector at every token: a bias is missing or added twice" if same else None


def _residual(value: LocalValue, forward: Forward) -> str | None:
    """A branch that is scaled before it is added to its stream: observed − input = factor · (expected − input)."""
    what, _, module = value.name.partition(" of ")
    before = forward.reference[value.cell].get(f"input of {module}")
    if what != "output" or before is None or before.shape != value.full_shape:
        return None
    start = take(before, value.index)
    a, b = value.observed - start, value.expected - start
    factor = _factor(a, b)
    return f"{module} adds {number_words(factor)} × what it should to its input" if close(a, factor * b) else None


RELATIONS: tuple[Relation, ...] = (
    _not_finite, _zero, _multiple, _of_another_cell, _skipped, _of_another_layer, _samples, _unrotated, _rotated,
    _heads, _shifted, _tokens, _per_token, _offset, _residual, _features,
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
        yield dim, np.array(sorted(places), dtype=np.int64), values[0].full_shape[dim]
