"""Why a gradient norm is wrong although the gradients are right: who was left out of it, or counted more than once.

The squared norm is a sum over ranks and parameters, so the difference of squares points at the terms: it equals
what a parameter, a class of parameters or a rank contributes, or the reported number is the sum over some of the
axes only, with copies counted once or every time.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from meshwright.prove.compare.result import Diagnosis, Kind
from meshwright.prove.compare.tensor_shards import Array, Assembly, coordinates
from meshwright.prove.diagnose.factors import Counts, close, factor_cause
from meshwright.prove.diagnose.phrases import join_words, number_words, place_words, rank_words
from meshwright.prove.stage_placement import Stages

RESIDUAL = 1e-11
"""Relative distance of squares within which a sum explains a norm."""
PROGRESS = 1e-3
MAX_CANDIDATES = 3


@dataclass(frozen=True, eq=False)
class NormSubject:
    """The norms of step 1 beside what they should be made of."""

    reported: Array
    """[rank]"""
    due: float
    names: tuple[str, ...]
    squares: Array
    """[rank, parameter]: sum of squares of what the rank holds of the gradient."""
    replicated: tuple[frozenset[str], ...]
    """Per parameter: the axes it is replicated over."""
    counts: Counts
    shared: Array
    """[parameter]: how many stages have a copy."""

    def copies(self) -> Array:
        """[parameter]: how many ranks hold each element."""
        sizes = [math.prod(self.counts.axes.size(axis) for axis in axes) for axes in self.replicated]
        return np.array(sizes, dtype=np.float64)

    def once(self) -> Array:
        """[parameter]: squared norm of the layout's gradients, every element once (copies that differ averaged)."""
        return np.asarray(self.squares.sum(axis=0) / self.copies(), dtype=np.float64)

    def explains(self, squares: Array | float) -> bool:
        """Whether every rank's reported norm is the root of `squares`, where the due norm is not."""
        mine = self.reported**2
        left = np.abs(mine - squares).max()
        error = np.abs(mine - self.due**2).max()
        return bool(left <= RESIDUAL * max(float(mine.max()), self.due**2) and left <= PROGRESS * error)


def norm_subject(
    reported: list[float], due: float, gradients: dict[str, Assembly], counts: Counts, stages: Stages | None
) -> NormSubject:
    """The norms of step 1 on every rank, with the pieces they should be made of."""
    names = tuple(gradients)
    squares = np.zeros((counts.axes.num_ranks(), len(names)))
    for column, assembly in enumerate(gradients.values()):
        for piece in assembly.pieces:
            squares[piece.rank, column] += float((piece.value**2).sum())
    replicated = tuple(frozenset(gradients[name].replicated) for name in names)
    shared = np.array([1 if stages is None else max(1, len(stages.sharing(name))) for name in names])
    return NormSubject(np.array(reported), due, names, squares, replicated, counts, shared)


def diagnose_norm(subject: NormSubject, *, gradients_wrong: bool) -> Diagnosis:
    """The likely cause of wrong norms at step 1."""
    if not np.isfinite(subject.reported).all():
        bad = np.flatnonzero(~np.isfinite(subject.reported)).tolist()
        return Diagnosis(Kind.NON_FINITE, f"not finite {_place(subject, bad)}", "see the gradients")
    if gradients_wrong and subject.explains(float(subject.once().sum())):
        return Diagnosis(Kind.CONSEQUENCE, "the norm of wrong gradients", "follows from the wrong gradients")
    found = _left_out(subject) or _reductions(subject) or _form(subject) or _one_rank(subject)
    if found is None and gradients_wrong:
        cause = "follows from the wrong gradients, though it is not their norm either"
        return Diagnosis(Kind.CONSEQUENCE, _seen(subject), cause)
    return found or Diagnosis(Kind.UNRECOGNISED, _seen(subject), "not recognised", _ratio(subject))


def _place(subject: NormSubject, ranks: list[int]) -> str:
    return place_words(ranks, range(len(subject.reported)), subject.counts.axes)


def _wrong(subject: NormSubject) -> list[int]:
    off = np.abs(subject.reported - subject.due) > 1e-12 * abs(subject.due)
    return [int(rank) for rank in np.flatnonzero(off)]


def _seen(subject: NormSubject) -> str:
    low, high = int(subject.reported.argmin()), int(subject.reported.argmax())
    spread = float(subject.reported[high] - subject.reported[low])
    if spread <= 1e-12 * abs(float(subject.reported[high])):
        return f"{subject.reported[0]:.6g} where {subject.due:.6g} was due"
    return f"{rank_words((low, high))} report different norms"


def _ratio(subject: NormSubject) -> str:
    worst = int(np.abs(subject.reported - subject.due).argmax())
    ratio = float(subject.reported[worst]) / subject.due if subject.due else math.inf
    return f"{subject.reported[worst]:.6g} on rank {worst} where {subject.due:.6g} was due, {number_words(ratio)} ×"


def _left_out(subject: NormSubject) -> Diagnosis | None:
    """A parameter, a class of them or a rank that counts a wrong number of times."""
    once, total = subject.once(), float(subject.once().sum())
    found: list[str] = []
    for label, members in _classes(subject):
        part = float(once[members].sum())
        if 0.0 < part < total and subject.explains(total - part):
            found.append(f"left out of the norm: {label}")
    for axes, label, members in _copied_classes(subject):
        times = math.prod(subject.counts.axes.size(axis) for axis in axes)
        if subject.explains(total + (times - 1) * float(once[members].sum())):
            return Diagnosis(Kind.NORM_MEMBERS, _seen(subject), f"counted {' × '.join(axes)} ({times}) times: {label}")
    if not found and subject.explains(float((once * subject.shared).sum())):
        num_copies = [str(int(num)) for num in sorted(set(subject.shared.tolist())) if num > 1]
        cause = f"counted {join_words(num_copies)} times: parameters shared by so many stages, once for each copy"
        return Diagnosis(Kind.NORM_MEMBERS, _seen(subject), cause)
    if not found:
        for label, members in _classes(subject):
            part = float(once[members].sum())
            if 0.0 < part < total and subject.explains(total + part):
                found.append(f"counted twice: {label}")
    for rank, part in enumerate((subject.squares / subject.copies()).sum(axis=1).tolist() if not found else ()):
        if 0.0 < part < total and subject.explains(total - part):
            found.append(f"left out of the norm: what rank {rank} holds")
    found = found or [f"left out of the norm: what {ranks}" for ranks in _left_out_positions(subject)]
    if not found:
        return None
    return Diagnosis(Kind.NORM_MEMBERS, _seen(subject), join_words(found[:MAX_CANDIDATES], last="or"))


def _left_out_positions(subject: NormSubject) -> Iterator[str]:
    """Positions on an axis whose ranks are left out, such as a stage: `ranks 2 and 3 hold (pp = 1)`."""
    axes, by_rank = subject.counts.axes, (subject.squares / subject.copies()).sum(axis=1)
    for axis, size in axes.used().items():
        for at in range(size):
            ranks = [rank for rank in range(len(by_rank)) if coordinates(axes)[rank][axis] == at]
            part = float(by_rank[ranks].sum())
            if len(ranks) > 1 and part > 0.0 and subject.explains(float(by_rank.sum()) - part):
                yield f"{rank_words(ranks)} hold ({axis} = {at})"


def _classes(subject: NormSubject) -> Iterator[tuple[str, list[int]]]:
    """Sets of parameters that one mistake could leave out: one, all of a name, a module, a way of being laid out."""
    names = subject.names
    for at, name in enumerate(names):
        yield name, [at]
    for axis in subject.counts.axes.used():
        yield f"parameters replicated over {axis}", [i for i, r in enumerate(subject.replicated) if axis in r]
        yield (
            f"parameters divided over {axis}",
            [i for i, r in enumerate(subject.replicated) if axis not in r],
        )
    for label in (_same_name, _module, _last_word):
        groups: dict[str, list[int]] = defaultdict(list)
        for at, name in enumerate(names):
            groups[label(name)].append(at)
        yield from ((key, members) for key, members in groups.items() if 1 < len(members) < len(names))


def _same_name(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _module(name: str) -> str:
    """`blocks.3.*` of everything in a numbered block, else the first word."""
    found = re.match(r"^(\D*\d+)\.", name)
    return f"{found.group(1) if found else name.split('.')[0]}.*"


def _last_word(name: str) -> str:
    return f"*.{name.rsplit('.', 1)[-1]}"


def _copied_classes(subject: NormSubject) -> Iterator[tuple[tuple[str, ...], str, list[int]]]:
    """Parameters replicated over some axes, which a sum over all ranks would count that many times."""
    used = tuple(subject.counts.axes.used())
    for num in range(1, len(used) + 1):
        for axes in itertools.combinations(used, num):
            members = [i for i, r in enumerate(subject.replicated) if r >= set(axes)]
            if members and len(members) == len(subject.names):
                yield axes, f"all parameters, which are replicated over {' and '.join(axes)}", members
            elif members:
                names = [subject.names[member] for member in members]
                listed = f" ({join_words(names)})" if len(names) <= MAX_CANDIDATES else ""
                yield axes, f"parameters replicated over {' and '.join(axes)}{listed}", members


def _reductions(subject: NormSubject) -> Diagnosis | None:
    """Local sums added over some axes only, with the copies along some axes counted once."""
    used = tuple(subject.counts.axes.used())
    options = [axes for num in range(len(used) + 1) for axes in itertools.combinations(used, num)]
    for missing, counted in sorted(itertools.product(options, options), key=lambda pair: len(pair[0]) + len(pair[1])):
        if not missing and not counted:
            continue
        if subject.explains(_partial_sums(subject, missing, counted)):
            told = [f"local norms not reduced over {join_words(missing)}"] if missing else []
            told += [f"copies along {join_words(counted)} each counted"] if counted else []
            return Diagnosis(Kind.NORM_MEMBERS, _seen(subject), "; ".join(told))
    return None


def _partial_sums(subject: NormSubject, missing: tuple[str, ...], counted: tuple[str, ...]) -> Array:
    """[rank]: squares summed over all axes but `missing`, divided by the copies along all axes but `counted`."""
    axes = subject.counts.axes
    copies = [math.prod(axes.size(axis) for axis in r if axis not in counted) for r in subject.replicated]
    local = (subject.squares / np.array(copies, dtype=np.float64)).sum(axis=1)
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in range(len(local)):
        position = coordinates(axes)[rank]
        groups[tuple(position[axis] for axis in missing)].append(rank)
    sums = np.zeros_like(local)
    for members in groups.values():
        sums[members] = local[members].sum()
    return np.asarray(sums, dtype=np.float64)


def _form(subject: NormSubject) -> Diagnosis | None:
    """The right sum in a wrong form: squared, rooted twice, norms added instead of squares, a factor."""
    total, once = float(subject.once().sum()), subject.once()
    forms: list[tuple[str, Callable[[], float]]] = [
        ("the square root is missing", lambda: total**2),
        ("the square root is taken twice", lambda: math.sqrt(total)),
        ("norms of parameters are added instead of their squares", lambda: float(np.sqrt(once).sum() ** 2)),
        ("the largest norm of a parameter instead of the norm of all", lambda: float(once.max())),
        ("norms of ranks are added instead of their squares", lambda: _sum_of_rank_norms(subject)),
    ]
    for cause, squares in forms:
        if subject.explains(squares()):
            return Diagnosis(Kind.NORM_FORM, _seen(subject), cause, _ratio(subject))
    ratios = subject.reported / subject.due if subject.due else subject.reported * math.inf
    ratio = float(ratios[0])
    if not np.allclose(ratios, ratio, rtol=1e-11, atol=0.0):
        return None
    for value, what in ((ratio, "the norm"), (ratio**2, "the sum of squares")):
        cause = factor_cause(value, subject.counts)
        if cause or close(value, 2.0) or close(value, 0.5):
            seen = f"{number_words(value)} × {what} of the reference on every rank"
            return Diagnosis(Kind.SCALED, seen, cause or "counted a wrong number of times", factor=value)
    return None


def _sum_of_rank_norms(subject: NormSubject) -> float:
    local = (subject.squares / subject.copies()).sum(axis=1)
    return float(np.sqrt(local).sum() ** 2)


def _one_rank(subject: NormSubject) -> Diagnosis | None:
    """Some ranks report the right norm."""
    wrong = _wrong(subject)
    if len(wrong) == len(subject.reported):
        return None
    return Diagnosis(Kind.UNRECOGNISED, f"wrong {_place(subject, wrong)}", "not recognised", _ratio(subject))
