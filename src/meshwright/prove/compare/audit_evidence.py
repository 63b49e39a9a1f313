"""Audit the evidence for missing, inconsistent or vacuous values.

Without this audit, two empty dictionaries or all-zero reference gradients would pass the comparison.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from meshwright.prove.compare.result import Diagnosis, FaultKind
from meshwright.prove.diagnose.phrases import rank_words
from meshwright.prove.placement import StagePlacement
from meshwright.prove.record.evidence import INITIAL, LayoutEvidence, ReferenceEvidence, UnequalCopies
from meshwright.units import counted, first_words, join_words

MAX_NAMES = 4
COPIES_START = "all copies of a shared parameter must start from the weights of the first copy"
COPIES_STAY = "every copy of a shared parameter needs the summed gradient, including several copies on one rank"
ROUNDING = 1e-9
"""Relative tolerance for sums that should be equal up to rounding."""


def audit(layout: LayoutEvidence, reference: ReferenceEvidence, *, same_names: bool = True) -> tuple[Diagnosis, ...]:
    """Return the findings that make the evidence unusable, or an empty tuple.

    Args:
        same_names: whether both sides must have the same tensors.
    """
    found = [
        *_presence(layout, reference),
        *(_names(layout, reference) if same_names else ()),
        *_series(layout, reference),
        *_batches(layout, reference),
        *_reference(layout, reference),
    ]
    return (*(Diagnosis(FaultKind.EVIDENCE, symptom, cause) for symptom, cause in found), *_unequal(layout.unequal))


def _unequal(copies: Iterable[UnequalCopies]) -> Iterator[Diagnosis]:
    """Yield one finding per kind of compared value; later findings may follow from the first."""
    by_value: dict[str, list[UnequalCopies]] = defaultdict(list)
    for pair in copies:
        by_value[pair.what].append(pair)
    for at, (what, found) in enumerate(by_value.items()):
        names, locations = (list(dict.fromkeys(values)) for values in ([f.name for f in found], map(_location, found)))
        largest = max(f.largest for f in found)
        which, where = first_words(names, MAX_NAMES), first_words(locations, MAX_NAMES)
        symptom = f"{what}: the copies of {which} {where} differ by up to {largest:.2g}"
        kind = FaultKind.CONSEQUENCE if at else FaultKind.REPLICAS_DIFFER
        cause = COPIES_START if what == INITIAL else COPIES_STAY
        yield Diagnosis(kind, symptom, f"may follow from differing copies: {next(iter(by_value))}" if at else cause)


def _location(copies: UnequalCopies) -> str:
    return f"on stages {copies.stages[0]} and {copies.stages[1]} of rank {copies.rank}"


Symptoms = Iterator[tuple[str, str]]


def _presence(layout: LayoutEvidence, reference: ReferenceEvidence) -> Symptoms:
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


def _names(layout: LayoutEvidence, reference: ReferenceEvidence) -> Symptoms:
    pairs: list[tuple[str, Collection[str], Collection[str]]] = [
        ("gradient", layout.gradients, reference.gradients),
        ("parameter", layout.parameters, reference.parameters),
    ]
    if layout.initial:
        pairs.append(("initial weight", layout.initial, reference.initial))
    if layout.after_first and reference.after_first:
        pairs.append(("parameter after step 1", layout.after_first, reference.after_first))
    for what, layout_names, reference_names in pairs:
        if layout_names and reference_names:
            yield from _difference(
                f"{what} in the reference but not in the layout", reference_names, layout_names, layout.stages
            )
            yield from _difference(f"{what} in the layout but not in the reference", layout_names, reference_names)
    yield from _difference("gradient without a parameter in the reference", reference.gradients, reference.parameters)


def _difference(
    what: str, have: Collection[str], lack: Collection[str], stages: StagePlacement | None = None
) -> Symptoms:
    names = [name for name in have if name not in lack]
    if names:
        expected = "" if stages is None else f": expected on {stages.describe(stages.stages_with_any(names))}"
        yield (f"{what}: {first_words(names, MAX_NAMES)}", f"the two sides do not hold the same parameters{expected}")


def _series(layout: LayoutEvidence, reference: ReferenceEvidence) -> Symptoms:
    num_ranks, num_steps = layout.axes.num_ranks(), len(reference.losses)
    for what, length in (("gradient norms", len(reference.grad_norms)), ("batches", len(reference.samples))):
        if length != num_steps:
            yield (f"the reference has {num_steps} losses and {length} {what}", "every step needs one of each")
    for what, by_rank in (
        ("losses", [len(values) for values in layout.losses]),
        ("gradient norms", [len(values) for values in layout.grad_norms]),
        ("samples", [len(values) for values in layout.samples]),
    ):
        if len(by_rank) != num_ranks:
            yield (
                f"{what} of {counted(len(by_rank), 'rank')}",
                f"the layout has {counted(num_ranks, 'rank')} ({layout.axes})",
            )
        off = [rank for rank, length in enumerate(by_rank) if length != num_steps]
        if off:
            steps = counted(by_rank[off[0]], "step")
            yield (f"{what} of {steps} on {rank_words(off)}", f"the reference has {counted(num_steps, 'step')}")


def _batches(layout: LayoutEvidence, reference: ReferenceEvidence) -> Symptoms:
    num_contributions = layout.axes.data_parallel() * layout.num_microbatches
    for step, batch in enumerate(reference.samples, 1):
        if not batch or len(batch) % num_contributions:
            yield (
                f"the batch of step {step} has {counted(len(batch), 'sample')}",
                f"data-parallel ranks × micro-batches ({num_contributions}) must divide the batch",
            )
            return


def _reference(layout: LayoutEvidence, reference: ReferenceEvidence) -> Symptoms:
    """Yield findings for a non-finite or inconsistent reference, which would make the verdicts wrong."""
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
    grid = (layout.axes.data_parallel(), layout.num_microbatches)
    for name, contributions in reference.partial_gradients.items():
        full = reference.gradients.get(name)
        if full is None:
            continue
        if contributions.shape != (*grid, *full.shape):
            yield (
                f"partial gradients of {name} have shape {tuple(contributions.shape)}",
                f"expected {(*grid, *full.shape)}",
            )
        elif not _sums_to(contributions.sum((0, 1)), full, contributions):
            yield f"the partial gradients of {name} do not sum to its gradient", cause
    for name, contributions in reference.stage_gradients.items():
        full = reference.gradients.get(name)
        if full is not None and not _sums_to(contributions.sum(0), full, contributions):
            yield f"the per-stage gradients of {name} do not sum to its gradient", cause
    if reference.grad_norms and reference.gradients:
        norm = sum(float((g.double() ** 2).sum()) for g in reference.gradients.values()) ** 0.5
        if not abs(norm - reference.grad_norms[0]) <= ROUNDING * norm:
            recorded = f"{reference.grad_norms[0]:.6g}"
            yield f"the reference's gradient norm {recorded} is not the norm of its gradients ({norm:.6g})", cause


def _sums_to(total: Tensor, full: Tensor, contributions: Tensor) -> bool:
    if not full.numel():
        return True
    size = float(contributions.abs().max())
    return bool(float((total - full).abs().max()) <= ROUNDING * size) or not bool(full.isfinite().all())
