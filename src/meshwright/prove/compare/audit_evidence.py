"""Whether the evidence is fit to prove anything: nothing missing, nothing that contradicts itself, nothing vacuous.

A comparison of two empty dictionaries succeeds, and so does one with a reference whose gradients are all zero.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from meshwright.prove.compare.result import Diagnosis, Kind
from meshwright.prove.diagnose.phrases import join_words, rank_words
from meshwright.prove.record.evidence import INITIAL, LayoutEvidence, ReferenceEvidence, UnequalCopies
from meshwright.prove.stage_placement import Stages

MAX_NAMES = 4
COPIES_START = "all copies of a shared parameter start from the weights of the first"
COPIES_STAY = "the gradients of a shared parameter are due, summed, on every copy, also where a rank has several"
ROUNDING = 1e-9
"""How far sums that are one and the same may be apart, relative; only a mistake is further."""


def audit(layout: LayoutEvidence, reference: ReferenceEvidence) -> tuple[Diagnosis, ...]:
    """What makes the evidence unfit; nothing when it is fit."""
    found = [
        *_presence(layout, reference),
        *_names(layout, reference),
        *_series(layout, reference),
        *_batches(layout, reference),
        *_reference(layout, reference),
    ]
    return (*(Diagnosis(Kind.EVIDENCE, seen, cause) for seen, cause in found), *_unequal(layout.unequal))


def _unequal(copies: Iterable[UnequalCopies]) -> Iterator[Diagnosis]:
    """One finding for all that is found at one time; what is unequal later may follow from it."""
    by_time: dict[str, list[UnequalCopies]] = defaultdict(list)
    for one in copies:
        by_time[one.what].append(one)
    for at, (what, found) in enumerate(by_time.items()):
        names, places = (list(dict.fromkeys(values)) for values in ([f.name for f in found], map(_place, found)))
        seen = f"{what}: the copies of {_cut(names)} {_cut(places)} differ by up to {max(f.largest for f in found):.2g}"
        kind = Kind.CONSEQUENCE if at else Kind.COPIES_DIFFER
        cause = COPIES_START if what == INITIAL else COPIES_STAY
        yield Diagnosis(kind, seen, f"may follow from copies whose {next(iter(by_time))} differs" if at else cause)


def _place(copies: UnequalCopies) -> str:
    return f"on stages {copies.stages[0]} and {copies.stages[1]} of rank {copies.rank}"


def _cut(words: list[str]) -> str:
    more = [f"{len(words) - MAX_NAMES} more"] if len(words) > MAX_NAMES else []
    return join_words(words[:MAX_NAMES] + more)


Found = Iterator[tuple[str, str]]


def _presence(layout: LayoutEvidence, reference: ReferenceEvidence) -> Found:
    nothing = "nothing was proved"
    for side, what, values in (
        ("reference", "steps", reference.losses),
        ("reference", "gradients", reference.gradients),
        ("reference", "parameters", reference.parameters),
        ("layout", "gradients", layout.gradients),
        ("layout", "parameters", layout.parameters),
    ):
        if not values:
            yield f"the {side} has no {what}", nothing
    if reference.gradients and not any(bool(g.any()) for g in reference.gradients.values()):
        yield "all gradients of the reference are zero", nothing


def _names(layout: LayoutEvidence, reference: ReferenceEvidence) -> Found:
    pairs: list[tuple[str, Collection[str], Collection[str]]] = [
        ("gradient", layout.gradients, reference.gradients),
        ("parameter", layout.parameters, reference.parameters),
    ]
    if layout.initial:
        pairs.append(("initial weight", layout.initial, reference.initial))
    if layout.after_first and reference.after_first:
        pairs.append(("parameter after step 1", layout.after_first, reference.after_first))
    for what, mine, theirs in pairs:
        if mine and theirs:
            yield from _difference(f"{what} in the reference but not in the layout", theirs, mine, layout.stages)
            yield from _difference(f"{what} in the layout but not in the reference", mine, theirs)
    yield from _difference("gradient of no parameter in the reference", reference.gradients, reference.parameters)


def _difference(what: str, have: Collection[str], lack: Collection[str], stages: Stages | None = None) -> Found:
    names = [name for name in have if name not in lack]
    if names:
        due = "" if stages is None else f": due on {stages.words(stages.holding(names))}"
        yield (
            f"{what}: {_cut(names)}",
            f"the two sides do not hold the same parameters{due}",
        )


def _series(layout: LayoutEvidence, reference: ReferenceEvidence) -> Found:
    num_ranks, num_steps = layout.axes.num_ranks(), len(reference.losses)
    for what, length in (("gradient norms", len(reference.grad_norms)), ("batches", len(reference.samples))):
        if length != num_steps:
            yield (
                f"the reference has {num_steps} losses and {length} {what}",
                "one of each is due for every step",
            )
    for what, by_rank in (
        ("losses", [len(values) for values in layout.losses]),
        ("gradient norms", [len(values) for values in layout.grad_norms]),
        ("samples", [len(values) for values in layout.samples]),
    ):
        if len(by_rank) != num_ranks:
            yield f"{what} of {len(by_rank)} ranks", f"the layout has {num_ranks} ranks ({layout.axes})"
        off = [rank for rank, length in enumerate(by_rank) if length != num_steps]
        if off:
            yield (
                f"{what} of {by_rank[off[0]]} steps on {rank_words(off)}",
                f"the reference has {num_steps} steps",
            )


def _batches(layout: LayoutEvidence, reference: ReferenceEvidence) -> Found:
    cells = layout.axes.data_parallel() * layout.num_microbatches
    for step, batch in enumerate(reference.samples, 1):
        if not batch or len(batch) % cells:
            yield (
                f"the batch of step {step} has {len(batch)} samples",
                f"data-parallel shares × micro-batches ({cells}) divides a batch",
            )
            return


def _reference(layout: LayoutEvidence, reference: ReferenceEvidence) -> Found:
    """The reference is finite and agrees with itself; what is compared with it would be judged wrongly."""
    cause = "the reference is at fault, not the layout"
    series: Mapping[str, list[float]] = {"loss": reference.losses, "gradient norm": reference.grad_norms}
    for what, values in series.items():
        if not all(torch.isfinite(torch.tensor(values, dtype=torch.float64))):
            yield f"a {what} of the reference is not finite", cause
    tensors: Mapping[str, Mapping[str, Tensor]] = {
        "gradient": reference.gradients,
        "parameter": reference.parameters,
        "initial weight": reference.initial,
        "parameter after step 1": reference.after_first,
    }
    for what, by_name in tensors.items():
        bad = [name for name, value in by_name.items() if not bool(torch.isfinite(value).all())]
        if bad:
            yield f"{what} not finite in the reference: {join_words(bad[:MAX_NAMES])}", cause
    cells = (layout.axes.data_parallel(), layout.num_microbatches)
    for name, parts in reference.partial_gradients.items():
        full = reference.gradients.get(name)
        if full is None:
            continue
        if parts.shape != (*cells, *full.shape):
            yield f"parts of {name} of shape {tuple(parts.shape)}", f"{(*cells, *full.shape)} is due"
        elif not _adds_up(parts.sum((0, 1)), full, parts):
            yield f"the parts of {name} do not add up to its gradient", cause
    for name, parts in reference.stage_gradients.items():
        full = reference.gradients.get(name)
        if full is not None and not _adds_up(parts.sum(0), full, parts):
            yield f"the stages' parts of {name} do not add up to its gradient", cause
    if reference.grad_norms and reference.gradients:
        own = sum(float((g.double() ** 2).sum()) for g in reference.gradients.values()) ** 0.5
        if not abs(own - reference.grad_norms[0]) <= ROUNDING * own:
            yield (
                f"the reference's norm {reference.grad_norms[0]:.6g} is not that of its gradients ({own:.6g})",
                cause,
            )


def _adds_up(total: Tensor, full: Tensor, parts: Tensor) -> bool:
    if not full.numel():
        return True
    size = float(parts.abs().max())
    return bool(float((total - full).abs().max()) <= ROUNDING * size) or not bool(full.isfinite().all())
