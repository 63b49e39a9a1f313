"""Diagnose a wrong gradient norm of correct gradients: parameters or ranks omitted or counted more than once.

The squared norm is a sum over ranks and parameters. The error in the squared norm therefore equals the contribution of
a parameter, a group of parameters or a rank, unless a reduction over some axis is missing.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from meshwright.prove.judge.tensors import Array, AssembledTensor, LayoutCounts, close, factor_cause
from meshwright.prove.placement import ExpertPlacement, StagePlacement
from meshwright.prove.result import Diagnosis, FaultKind, StepValue, coordinates, number_words, rank_words, scope_words
from meshwright.units import join_words

RESIDUAL = 1e-11
"""Relative tolerance for matching a sum of squares to a reported squared norm."""
PROGRESS = 1e-3
EQUAL = 1e-12
"""Relative difference up to which reported norms count as equal."""
MAX_CANDIDATES = 3


@dataclass(frozen=True, eq=False)
class SuspectNorm:
    """Reported norms of a step and the terms they should consist of."""

    reported: Array
    """[rank]: reported norm."""
    expected: float
    names: tuple[str, ...]
    squares: Array
    """[rank, parameter]: sum of squares of the local gradient shard."""
    replicated: tuple[frozenset[str], ...]
    """Axes along which each parameter is replicated."""
    counts: LayoutCounts
    shared: Array
    """[parameter]: number of stages that share the parameter, at least 1."""
    experts: ExpertPlacement | None = None
    rounded: Mapping[str, float] = field(default_factory=dict)
    """Squared norms that are rounded at some place, by words for it."""
    earlier: tuple[float, ...] = ()
    """Expected norms of the steps before."""

    def num_replicas(self) -> Array:
        """Return the number of replicas of each parameter: [parameter]."""
        sizes = [math.prod(self.counts.axes.size(axis) for axis in axes) for axes in self.replicated]
        return np.array(sizes, dtype=np.float64)

    def unique_squares(self) -> Array:
        """Return the squared norm of each gradient, with replicas averaged: [parameter]."""
        return np.asarray(self.squares.sum(axis=0) / self.num_replicas(), dtype=np.float64)

    def explains(self, squares: Array | float) -> bool:
        """Return whether `squares` matches the squared norm on every rank and differs from the expected one."""
        mine = self.reported**2
        left = np.abs(mine - squares).max()
        error = np.abs(mine - self.expected**2).max()
        limit = max(RESIDUAL, self.counts.rounding)
        return bool(
            left <= limit * max(float(mine.max()), self.expected**2)
            and left <= max(PROGRESS, self.counts.rounding) * error
        )


def suspect_norm(
    value: StepValue,
    gradients: dict[str, AssembledTensor],
    counts: LayoutCounts,
    stages: StagePlacement | None = None,
    experts: ExpertPlacement | None = None,
    earlier: tuple[float, ...] = (),
) -> SuspectNorm:
    """Collect the reported norms of a step and the terms they should consist of."""
    names = tuple(gradients)
    squares = np.zeros((counts.axes.num_ranks(), len(names)))
    for column, assembly in enumerate(gradients.values()):
        for shard in assembly.shards:
            squares[shard.rank, column] += float((shard.value**2).sum())
    replicated = tuple(frozenset(gradients[name].replicated) for name in names)
    shared = np.array([1 if stages is None else max(1, len(stages.sharing_stages(name))) for name in names])
    reported = np.array(value.observed)
    suspect = SuspectNorm(reported, value.expected, names, squares, replicated, counts, shared, experts, {}, earlier)
    return replace(suspect, rounded=dict(_rounded(suspect, gradients))) if math.isfinite(value.expected) else suspect


def _rounded(suspect: SuspectNorm, gradients: dict[str, AssembledTensor]) -> Iterator[tuple[str, float]]:
    """Yield squared norms that are rounded at some place, by words for it."""
    for dtype in (torch.float32, torch.bfloat16):

        def of(values: Array | float, dtype: torch.dtype = dtype) -> Array:
            return np.asarray(torch.as_tensor(values, dtype=torch.float64).to(dtype).double().numpy())

        total, name = 0.0, str(dtype).removeprefix("torch.")
        for assembly in gradients.values():
            parts = [float((of(shard.value) ** 2).sum()) for shard in assembly.shards]
            total += sum(parts) / assembly.num_replicas()
        yield f"that of gradients rounded to {name}", total
        by_rank = (suspect.squares / suspect.num_replicas()).sum(axis=1)
        yield f"of squares that each rank rounds to {name} before they are summed", float(of(by_rank).sum())
        yield f"of a sum of squares that is rounded to {name}", float(of(suspect.expected**2))
        yield f"rounded to {name}", float(of(suspect.expected)) ** 2


def diagnose_norm(suspect: SuspectNorm) -> Diagnosis:
    """Return the likely cause of wrong norms of a step, given its gradients."""
    if not math.isfinite(suspect.expected) or not suspect.names:
        return Diagnosis(FaultKind.CONSEQUENCE, "wrong", "follows from gradients that are missing or not finite")
    if not np.isfinite(suspect.reported).all():
        bad = np.flatnonzero(~np.isfinite(suspect.reported)).tolist()
        return Diagnosis(FaultKind.NON_FINITE, f"not finite {_scope(suspect, bad)}", "the gradients are finite")
    found = _wrong_members(suspect) or _missing_reduction(suspect) or _wrong_form(suspect) or _wrong_ranks_only(suspect)
    return found or Diagnosis(FaultKind.UNRECOGNISED, _symptom(suspect), "not recognised", _ratio(suspect))


def _scope(suspect: SuspectNorm, ranks: list[int]) -> str:
    return scope_words(ranks, range(len(suspect.reported)), suspect.counts.axes)


def _wrong(suspect: SuspectNorm) -> list[int]:
    off = np.abs(suspect.reported - suspect.expected) > max(EQUAL, suspect.counts.rounding) * abs(suspect.expected)
    return [int(rank) for rank in np.flatnonzero(off)]


def _symptom(suspect: SuspectNorm) -> str:
    low, high = int(suspect.reported.argmin()), int(suspect.reported.argmax())
    spread = float(suspect.reported[high] - suspect.reported[low])
    if spread <= max(EQUAL, suspect.counts.rounding) * abs(float(suspect.reported[high])):
        return f"{suspect.reported[0]:.6g}, expected {suspect.expected:.6g}"
    return f"{rank_words((low, high))} report different norms"


def _ratio(suspect: SuspectNorm) -> str:
    worst = int(np.abs(suspect.reported - suspect.expected).argmax())
    ratio = float(suspect.reported[worst]) / suspect.expected if suspect.expected else math.inf
    return (
        f"{suspect.reported[worst]:.6g} on rank {worst}, expected {suspect.expected:.6g} (ratio {number_words(ratio)})"
    )


def _wrong_members(suspect: SuspectNorm) -> Diagnosis | None:
    """Diagnose a parameter, parameter group or rank that is counted the wrong number of times."""
    unique_squares, total = suspect.unique_squares(), float(suspect.unique_squares().sum())
    found: list[str] = []
    if experts := _wrong_experts(suspect):
        return Diagnosis(FaultKind.NORM_MEMBERS, _symptom(suspect), experts)
    for label, members in _classes(suspect):
        part = float(unique_squares[members].sum())
        if 0.0 < part < total and suspect.explains(total - part):
            found.append(f"left out of the norm: {label}")
    for axes, label, members in _replicated_classes(suspect):
        times = math.prod(suspect.counts.axes.size(axis) for axis in axes)
        whole = f"{' × '.join(axes)} ({times})"
        for counted, words in ((times, whole), (1.0 / times, f"1 / {whole}")):
            if suspect.explains(total + (counted - 1) * float(unique_squares[members].sum())):
                cause = f"counted {words} times: {label}"
                return Diagnosis(FaultKind.NORM_MEMBERS, _symptom(suspect), cause)
    if not found and suspect.explains(float((unique_squares * suspect.shared).sum())):
        copy_counts = [str(int(num)) for num in sorted(set(suspect.shared.tolist())) if num > 1]
        cause = f"counted {join_words(copy_counts)} times: shared parameters, once per stage that holds a copy"
        return Diagnosis(FaultKind.NORM_MEMBERS, _symptom(suspect), cause)
    if not found:
        for label, members in _classes(suspect):
            part = float(unique_squares[members].sum())
            if 0.0 < part < total and suspect.explains(total + part):
                found.append(f"counted twice: {label}")
    for rank, part in enumerate((suspect.squares / suspect.num_replicas()).sum(axis=1).tolist() if not found else ()):
        if 0.0 < part < total and suspect.explains(total - part):
            found.append(f"left out of the norm: the shards of rank {rank}")
    found = found or [f"left out of the norm: the shards of {ranks}" for ranks in _left_out_positions(suspect)]
    if not found:
        return None
    return Diagnosis(FaultKind.NORM_MEMBERS, _symptom(suspect), join_words(found[:MAX_CANDIDATES], last="or"))


def _wrong_experts(suspect: SuspectNorm) -> str:
    """Return the cause if experts, which are sharded over other ranks than the rest, count a wrong number of times."""
    experts = suspect.experts
    members = [at for at, name in enumerate(suspect.names) if experts is not None and name in experts.parameters]
    if experts is None or not members:
        return ""
    total, part = float(suspect.unique_squares().sum()), float(suspect.unique_squares()[members].sum())
    if experts.size > 1 and suspect.explains(total + (experts.size - 1) * part):
        return f"counted ep ({experts.size}) times: experts, as if every rank of ep held all of them"
    if experts.size > 1 and suspect.explains(total + (1.0 / experts.size - 1.0) * part):
        return f"counted 1 / ep times ({experts.size}): experts, as if ranks of ep held the same ones"
    if experts.num_groups > 1 and suspect.explains(total + (experts.num_groups - 1) * part):
        return f"counted {experts.num_groups} times: experts, once by each of the ranks that hold the same ones"
    return "left out of the norm: experts" if suspect.explains(total - part) else ""


def _left_out_positions(suspect: SuspectNorm) -> Iterator[str]:
    """Yield mesh coordinates whose ranks are left out of the norm: `ranks 2 and 3 (pp = 1)`."""
    axes, by_rank = suspect.counts.axes, (suspect.squares / suspect.num_replicas()).sum(axis=1)
    for axis, size in axes.used().items():
        for at in range(size):
            ranks = [rank for rank in range(len(by_rank)) if coordinates(axes)[rank][axis] == at]
            part = float(by_rank[ranks].sum())
            if len(ranks) > 1 and part > 0.0 and suspect.explains(float(by_rank.sum()) - part):
                yield f"{rank_words(ranks)} ({axis} = {at})"


def _classes(suspect: SuspectNorm) -> Iterator[tuple[str, list[int]]]:
    """Yield groups of parameters that a single fault could affect: by name, module or placement."""
    names = suspect.names
    for at, name in enumerate(names):
        yield name, [at]
    for axis in suspect.counts.axes.used():
        yield f"parameters replicated over {axis}", [i for i, r in enumerate(suspect.replicated) if axis in r]
        yield (f"parameters sharded over {axis}", [i for i, r in enumerate(suspect.replicated) if axis not in r])
    for label in (_same_name, _module, _last_word):
        groups: dict[str, list[int]] = defaultdict(list)
        for at, name in enumerate(names):
            groups[label(name)].append(at)
        yield from ((key, members) for key, members in groups.items() if 1 < len(members) < len(names))


def _same_name(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _module(name: str) -> str:
    """Return `blocks.3.*` for a parameter of a numbered block, else the first component of its name."""
    found = re.match(r"^(\D*\d+)\.", name)
    return f"{found.group(1) if found else name.split('.')[0]}.*"


def _last_word(name: str) -> str:
    return f"*.{name.rsplit('.', 1)[-1]}"


def _replicated_classes(suspect: SuspectNorm) -> Iterator[tuple[tuple[str, ...], str, list[int]]]:
    """Group parameters by the axes they are replicated over; a sum over all ranks counts each replica."""
    used = tuple(suspect.counts.axes.used())
    for num in range(1, len(used) + 1):
        for axes in itertools.combinations(used, num):
            members = [i for i, r in enumerate(suspect.replicated) if r >= set(axes)]
            if members and len(members) == len(suspect.names):
                yield axes, f"all parameters, which are replicated over {' and '.join(axes)}", members
            elif members:
                names = [suspect.names[member] for member in members]
                listed = f" ({join_words(names)})" if len(names) <= MAX_CANDIDATES else ""
                yield axes, f"parameters replicated over {' and '.join(axes)}{listed}", members


def _missing_reduction(suspect: SuspectNorm) -> Diagnosis | None:
    """Diagnose a reduction that is missing along some axes or counts every replica."""
    used = tuple(suspect.counts.axes.used())
    options = [axes for num in range(len(used) + 1) for axes in itertools.combinations(used, num)]
    for missing, recounted in sorted(itertools.product(options, options), key=lambda pair: len(pair[0]) + len(pair[1])):
        if not missing and not recounted:
            continue
        if suspect.explains(_partial_sums(suspect, missing, recounted)):
            causes = [f"local norms not reduced over {join_words(missing)}"] if missing else []
            causes += [f"replicas along {join_words(recounted)} counted separately"] if recounted else []
            return Diagnosis(FaultKind.NORM_MEMBERS, _symptom(suspect), "; ".join(causes))
    return None


def _partial_sums(suspect: SuspectNorm, missing: tuple[str, ...], recounted: tuple[str, ...]) -> Array:
    """Sum squares over all axes except `missing`; replicas along `recounted` are counted separately: [rank]."""
    axes = suspect.counts.axes
    num_replicas = [math.prod(axes.size(axis) for axis in r if axis not in recounted) for r in suspect.replicated]
    local = (suspect.squares / np.array(num_replicas, dtype=np.float64)).sum(axis=1)
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in range(len(local)):
        position = coordinates(axes)[rank]
        groups[tuple(position[axis] for axis in missing)].append(rank)
    sums = np.zeros_like(local)
    for members in groups.values():
        sums[members] = local[members].sum()
    return np.asarray(sums, dtype=np.float64)


def _wrong_form(suspect: SuspectNorm) -> Diagnosis | None:
    """Diagnose correct terms combined incorrectly: a missing or repeated square root, a sum of norms, or a factor."""
    total, unique_squares = float(suspect.unique_squares().sum()), suspect.unique_squares()
    forms: list[tuple[str, Callable[[], float]]] = [
        ("the square root is missing", lambda: total**2),
        ("the square root is taken twice", lambda: math.sqrt(total)),
        ("norms of parameters are added instead of their squares", lambda: float(np.sqrt(unique_squares).sum() ** 2)),
        ("the largest norm of a parameter instead of the norm of all", lambda: float(unique_squares.max())),
        ("per-rank norms are summed instead of their squares", lambda: _sum_of_rank_norms(suspect)),
    ]
    for what, rounded in suspect.rounded.items():
        if suspect.explains(rounded):
            return Diagnosis(FaultKind.ROUNDED, _symptom(suspect), f"the norm is {what}", _ratio(suspect))
    for step, norm in enumerate(suspect.earlier, start=1):
        if suspect.explains(norm**2):
            cause = f"the norm is that of step {step}"
            return Diagnosis(FaultKind.OTHER_STEP, _symptom(suspect), cause, _ratio(suspect))
    for cause, squares in forms:
        if suspect.explains(squares()):
            return Diagnosis(FaultKind.NORM_FORM, _symptom(suspect), cause, _ratio(suspect))
    ratios = suspect.reported / suspect.expected if suspect.expected else suspect.reported * math.inf
    ratio = float(ratios[0])
    rounding = suspect.counts.rounding
    if not np.allclose(ratios, ratio, rtol=max(RESIDUAL, rounding), atol=0.0):
        return None
    for value, what in ((ratio, "the norm"), (ratio**2, "the sum of squares")):
        cause = factor_cause(value, suspect.counts)
        if cause or close(value, 2.0, rounding) or close(value, 0.5, rounding):
            symptom = f"{number_words(value)} × {what} of the reference on every rank"
            return Diagnosis(FaultKind.SCALED, symptom, cause or "counted the wrong number of times", factor=value)
    return None


def _sum_of_rank_norms(suspect: SuspectNorm) -> float:
    local = (suspect.squares / suspect.num_replicas()).sum(axis=1)
    return float(np.sqrt(local).sum() ** 2)


def _wrong_ranks_only(suspect: SuspectNorm) -> Diagnosis | None:
    """Diagnose wrong norms on some ranks only."""
    wrong = _wrong(suspect)
    if len(wrong) == len(suspect.reported):
        return None
    return Diagnosis(FaultKind.UNRECOGNISED, f"wrong {_scope(suspect, wrong)}", "not recognised", _ratio(suspect))
