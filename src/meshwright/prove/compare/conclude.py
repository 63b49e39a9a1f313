"""The proof's conclusion: every number of the layout beside the reference's, and why those that differ do.

In the order in which a fault travels: samples, initial weights, gradients, norm and loss of step 1, the first
update, everything after it. A finding that follows from an earlier one says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from meshwright.prove.compare.audit_evidence import audit
from meshwright.prove.compare.result import Diagnosis, Kind, ParameterResult, ProofResult, SeriesResult, TensorResult
from meshwright.prove.compare.scalar_verdict import (
    Limits,
    explain_first_norm,
    explain_later_norms,
    explain_losses,
    weigh_series,
)
from meshwright.prove.compare.tensor_shards import Array
from meshwright.prove.compare.tensor_verdict import ByName, any_wrong, to_arrays, weigh_all
from meshwright.prove.diagnose.contributions import scaled
from meshwright.prove.diagnose.factors import Counts, close
from meshwright.prove.diagnose.gradients import Surroundings, diagnose_gradient
from meshwright.prove.diagnose.notes import notes_on
from meshwright.prove.diagnose.phrases import join_words, place_words, rank_words
from meshwright.prove.diagnose.pipeline import located
from meshwright.prove.diagnose.samples import diagnose_samples
from meshwright.prove.diagnose.shared_parameters import SharedParts
from meshwright.prove.diagnose.weights import History, diagnose_initial, diagnose_update
from meshwright.prove.record.evidence import INITIAL, LayoutEvidence, ReferenceEvidence, Shard


@dataclass(frozen=True)
class _Sides:
    """What is compared, and how strictly."""

    layout: LayoutEvidence
    reference: ReferenceEvidence
    counts: Counts
    limits: Limits
    around: Surroundings
    """What was wrong before the first gradient."""


def compare(
    layout: LayoutEvidence,
    reference: ReferenceEvidence,
    *,
    gradient_tolerance: float = 1e-12,
    later_tolerance: float = 1e-9,
) -> ProofResult:
    """Compare what the ranks saw with what one process computed.

    Args:
        gradient_tolerance: for what precedes the first optimizer step: initial weights, and loss, gradients and norm
            of step 1. The few roundings in which the two sides differ stay far below it.
        later_tolerance: for what follows; an optimizer step divides by small numbers.
    """
    counts = Counts(layout.axes, layout.num_microbatches, len(reference.samples[0]) if reference.samples else 0)
    sides = _Sides(layout, reference, counts, Limits(gradient_tolerance, later_tolerance), Surroundings({}))
    initial = _initial(sides)
    initial_wrong = any_wrong(initial) or any(copies.what == INITIAL for copies in layout.unequal)
    around = Surroundings({}, bool(_strays(sides, num_steps=1)), initial_wrong)
    sides = replace(sides, around=around)
    step_1 = _step_1(sides)
    first = _first_update(sides, step_1) if layout.after_first and reference.after_first else {}
    samples = _strays(sides)
    later_wrong = step_1.wrong or ("wrong samples" if samples else "") or _updates_wrong(first)
    later_wrong = later_wrong or ("copies on one rank that differ" if layout.unequal else "")
    final = _final(sides, step_1, first, later_wrong)
    update_wrong = bool(later_wrong) or any_wrong(final)
    result = ProofResult(
        axes=layout.axes,
        num_microbatches=layout.num_microbatches,
        gradient_tolerance=gradient_tolerance,
        later_tolerance=later_tolerance,
        num_steps=len(reference.losses),
        findings=audit(layout, reference),
        samples=samples,
        losses=_losses(sides, update_wrong),
        grad_norm=explain_later_norms(step_1.norms, update_wrong=update_wrong),
        parameters=_parameters(reference, step_1.gradients, final, initial, first),
    )
    return replace(result, notes=notes_on(result, layout.stages))


def _strays(sides: _Sides, *, num_steps: int | None = None) -> tuple[Diagnosis, ...]:
    layout, batches = sides.layout, sides.reference.samples[:num_steps]
    return diagnose_samples(layout.samples, batches, layout.axes, layout.num_microbatches)


def _parameters(
    reference: ReferenceEvidence, gradients: ByName, final: ByName, initial: ByName, first: ByName
) -> tuple[ParameterResult, ...]:
    def of(weighed: ByName, name: str) -> TensorResult | None:
        return weighed[name].result if name in weighed else None

    return tuple(
        ParameterResult(
            name=name,
            shape=tuple(value.shape),
            gradient=of(gradients, name),
            final=final[name].result,
            initial=of(initial, name),
            first=of(first, name),
        )
        for name, value in reference.parameters.items()
    )


def _initial(sides: _Sides) -> ByName:
    if not sides.layout.initial:
        return {}
    dues = to_arrays(sides.reference.initial)
    weighed, around = weigh_all(sides.layout.initial, dues, sides.counts, sides.limits.first), Surroundings(dues)
    return {
        name: one if one.result.ok else one.diagnosed(diagnose_initial(one.subject, around))
        for name, one in weighed.items()
    }


def _gradients(sides: _Sides) -> ByName:
    layout, counts = sides.layout, sides.counts
    dues, cells = to_arrays(sides.reference.gradients), (counts.axes.data_parallel(), counts.num_microbatches)
    parts = {
        name: value
        for name, value in to_arrays(sides.reference.partial_gradients).items()
        if name in dues and value.shape == (*cells, *dues[name].shape)
    }
    shards = {
        name: _with_empty_pieces(found, layout.parameters.get(name, [])) for name, found in layout.gradients.items()
    }
    weighed = weigh_all(shards, dues, counts, sides.limits.first, parts)
    around = replace(sides.around, others=dues, shared=_shared_parts(sides, dues))
    for name, one in weighed.items():
        if not one.result.ok:
            absent = _absent(layout.gradients.get(name, []), layout.parameters.get(name, []), counts)
            weighed[name] = one.diagnosed(absent or diagnose_gradient(one.subject, around))
    return located(_narrowed(weighed, counts), layout.stages)


def _shared_parts(sides: _Sides, dues: Mapping[str, Array]) -> SharedParts | None:
    stages = sides.layout.stages
    if stages is None:
        return None
    found = to_arrays(sides.reference.stage_gradients)
    shape = {name: (len(stages.ranks), *due.shape) for name, due in dues.items()}
    return SharedParts(stages, {name: parts for name, parts in found.items() if parts.shape == shape.get(name)})


def _with_empty_pieces(gradient: list[Shard], parameter: list[Shard]) -> list[Shard]:
    """A rank whose piece of the parameter is empty may have no gradient at all."""
    have = {shard.rank for shard in gradient}
    return gradient + [shard for shard in parameter if shard.rank not in have and not shard.value.numel()]


def _absent(gradient: list[Shard], parameter: list[Shard], counts: Counts) -> Diagnosis | None:
    """Ranks that hold a piece of the parameter and have no gradient for it, not even zeros."""
    holders = {shard.rank for shard in parameter if shard.value.numel()}
    lack = holders - {shard.rank for shard in gradient}
    if not lack:
        return None
    place = place_words(lack, holders, counts.axes)
    whose = "this parameter" if lack == holders else f"{rank_words(lack)}'s piece of it"
    return Diagnosis(Kind.ZERO, f"no gradient {place}", f"no gradient reached {whose}")


def _narrowed(weighed: ByName, counts: Counts) -> ByName:
    """Blames the axis over which exactly the parameters with one wrong factor are replicated."""
    members: dict[float, set[str]] = {}
    for name, one in weighed.items():
        if one.result.diagnosis is not None and one.result.diagnosis.factor is not None:
            members.setdefault(one.result.diagnosis.factor, set()).add(name)
    narrowed = dict(weighed)
    for factor, names in members.items():
        fitting = [
            axis
            for axis, size in counts.axes.used().items()
            if (close(factor, size) or close(factor, 1 / size))
            and names == {name for name, one in weighed.items() if axis in one.result.replicated}
        ]
        if len(fitting) == 1 and len(names) < len(weighed):
            for name in names:
                blamed = scaled(factor, weighed[name].subject.place(), counts, only_axis=fitting[0])
                scope = f"{blamed.cause}, on exactly the parameters replicated over {fitting[0]}"
                narrowed[name] = weighed[name].diagnosed(replace(blamed, cause=scope))
    return narrowed


@dataclass(frozen=True)
class _Step1:
    """What is known before the first update."""

    gradients: ByName
    norms: SeriesResult
    wrong: str
    """What makes the update wrong, in words; empty when nothing does."""

    def own_wrong(self, name: str) -> str:
        return "its wrong gradient" if name in self.gradients and not self.gradients[name].result.ok else ""

    def skipped(self) -> bool:
        """Whether the norm is such that the step must be skipped."""
        return self.norms.diagnosis is not None and self.norms.diagnosis.kind is Kind.NON_FINITE


def _step_1(sides: _Sides) -> _Step1:
    gradients = _gradients(sides)
    norms = _first_norms(sides, gradients)
    wrong = sides.around.words() or ("wrong gradients of other parameters" if any_wrong(gradients) else "")
    return _Step1(gradients, norms, wrong or ("a wrong gradient norm" if norms.diagnosis is not None else ""))


def _first_norms(sides: _Sides, gradients: ByName) -> SeriesResult:
    num_ranks = sides.counts.axes.num_ranks()
    norms = weigh_series(sides.layout.grad_norms, sides.reference.grad_norms, num_ranks, sides.limits)
    assemblies = {name: one.subject.assembly for name, one in gradients.items()}
    wrong = any_wrong(gradients)
    return explain_first_norm(norms, assemblies, sides.counts, sides.layout.stages, gradients_wrong=wrong)


def _first_update(sides: _Sides, step_1: _Step1) -> ByName:
    dues = to_arrays(sides.reference.after_first)
    weighed = weigh_all(sides.layout.after_first, dues, sides.counts, sides.limits.later)
    if not any_wrong(weighed):
        return weighed
    last = weigh_all(sides.layout.parameters, to_arrays(sides.reference.parameters), sides.counts, sides.limits.later)
    for name, one in weighed.items():
        if not one.result.ok:
            history = History(
                initial=_start(sides, name, one.subject.due),
                last=last[name].subject.assembly if name in last else None,
                own_wrong=step_1.own_wrong(name),
                others_wrong=step_1.wrong,
                skipped=step_1.skipped(),
            )
            around = replace(sides.around, others=dues)
            weighed[name] = one.diagnosed(diagnose_update(one.subject, around, history))
    return weighed


def _updates_wrong(weighed: ByName) -> str:
    wrong = [name for name, one in weighed.items() if not one.result.ok]
    more = [f"{len(wrong) - 2} more"] if len(wrong) > 2 else []
    return f"the wrong update of {join_words(wrong[:2] + more)}" if wrong else ""


def _final(sides: _Sides, step_1: _Step1, first: ByName, later_wrong: str) -> ByName:
    dues = to_arrays(sides.reference.parameters)
    weighed = weigh_all(sides.layout.parameters, dues, sides.counts, sides.limits.later)
    around = replace(sides.around, others=dues)
    right = "the gradients and the norm of step 1 are right"
    for name, one in weighed.items():
        if one.result.ok:
            continue
        own = step_1.own_wrong(name)
        if not own and name in first and not first[name].result.ok:
            own = "its wrong update in step 1"
        history = History(
            initial=_start(sides, name, one.subject.due),
            own_wrong=own,
            others_wrong=later_wrong,
            skipped=step_1.skipped(),
            known_right="everything is right up to the first update" if first else right,
        )
        weighed[name] = one.diagnosed(diagnose_update(one.subject, around, history))
    return weighed if first else _fed_back(weighed)


def _fed_back(weighed: ByName) -> ByName:
    """Without evidence after the first step, what is not recognised may follow from an update that is."""
    roots = {Kind.NOT_UPDATED, Kind.STEP_SCALED, Kind.WEIGHT_DECAY, Kind.MOVED}
    unknown = {Kind.UNRECOGNISED, Kind.COPIES_DIFFER}
    kinds = {name: one.result.diagnosis.kind for name, one in weighed.items() if one.result.diagnosis is not None}
    blamed = _updates_wrong({name: weighed[name] for name, kind in kinds.items() if kind in roots})
    result = dict(weighed)
    for name in [name for name, kind in kinds.items() if blamed and kind in unknown]:
        seen, cause = f"wrong {weighed[name].subject.place()}", f"may follow from {blamed}"
        result[name] = weighed[name].diagnosed(Diagnosis(Kind.CONSEQUENCE, seen, cause))
    return result


def _start(sides: _Sides, name: str, due: Array) -> Array | None:
    found: Mapping[str, Tensor] = sides.reference.initial
    if name not in found or tuple(found[name].shape) != due.shape:
        return None
    return to_arrays({name: found[name]})[name]


def _losses(sides: _Sides, update_wrong: bool) -> SeriesResult:
    counts, reference = sides.counts, sides.reference
    losses = weigh_series(sides.layout.losses, reference.losses, counts.axes.num_ranks(), sides.limits)
    parts, cells = reference.partial_losses, (counts.axes.data_parallel(), counts.num_microbatches)
    known = None if parts is None or tuple(parts.shape) != cells else to_arrays({"": parts})[""]
    return explain_losses(losses, known, counts, follows=sides.around.words(), update_wrong=update_wrong)
