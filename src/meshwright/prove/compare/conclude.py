"""Compare the layout's evidence with the reference and diagnose each difference.

Values are compared in the order a fault propagates: samples, initial weights, gradients, norm and loss of step 1, the
first update, later steps. Findings that follow from an earlier one are marked as consequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from meshwright.prove.compare.audit_evidence import audit
from meshwright.prove.compare.context_contributions import ContextContributions
from meshwright.prove.compare.known_issues import (
    KnownFault,
    as_consequences,
    explain_counts,
    known_fault_of_later_steps,
    known_fault_of_step_1,
    losses_as_consequence,
    norms_as_consequence,
    weights_left_gathered,
)
from meshwright.prove.compare.result import (
    Diagnosis,
    FaultKind,
    ParameterResult,
    ProofResult,
    SeriesResult,
    TensorResult,
)
from meshwright.prove.compare.scalar_verdict import (
    Tolerances,
    compare_series,
    explain_first_norm,
    explain_later_norms,
    explain_losses,
)
from meshwright.prove.compare.tensor_shards import Array
from meshwright.prove.compare.tensor_verdict import Verdicts, any_wrong, compare_tensors, to_arrays
from meshwright.prove.diagnose.accumulated_sum import name_accumulated_sums
from meshwright.prove.diagnose.contents import diagnose_contents
from meshwright.prove.diagnose.contributions import scale_diagnosis
from meshwright.prove.diagnose.experts import narrow_to_experts
from meshwright.prove.diagnose.factors import LayoutCounts, close
from meshwright.prove.diagnose.gradients import DiagnosisContext, diagnose_gradient
from meshwright.prove.diagnose.notes import notes_on
from meshwright.prove.diagnose.phrases import rank_words, scope_words
from meshwright.prove.diagnose.pipeline import locate_stages
from meshwright.prove.diagnose.samples import diagnose_samples
from meshwright.prove.diagnose.shared_parameters import StageContributions
from meshwright.prove.diagnose.suspect import UNKNOWN
from meshwright.prove.diagnose.weights import UpdateHistory, diagnose_initial, diagnose_update
from meshwright.prove.record.evidence import (
    INITIAL,
    ContextEvidence,
    LayoutEvidence,
    RecordedShard,
    ReferenceEvidence,
    Variants,
)
from meshwright.units import first_words


@dataclass(frozen=True)
class _Sides:
    """Evidence of the layout and the reference, with tolerances and diagnosis context."""

    layout: LayoutEvidence
    reference: ReferenceEvidence
    counts: LayoutCounts
    tolerances: Tolerances
    context: DiagnosisContext
    """Context of the diagnoses, including faults found before the first gradient."""
    by_tokens: ContextContributions | None = None
    """Contributions of context-parallel ranks."""


def compare(
    layout: LayoutEvidence,
    reference: ReferenceEvidence,
    *,
    gradient_tolerance: float = 1e-12,
    later_tolerance: float = 1e-9,
    variants: Variants | None = None,
    by_context: Callable[[], ContextEvidence] | None = None,
    branches: Sequence[Diagnosis] = (),
) -> ProofResult:
    """Compare the ranks' evidence with the single-process reference.

    Args:
        gradient_tolerance: relative tolerance for the initial weights and for the loss, gradients and norm of step 1.
            Rounding stays far below it.
        later_tolerance: relative tolerance after that; larger because AdamW divides by small numbers.
        variants: faulty references to compare with if a fault is not recognised.
        by_context: computes the contributions of context-parallel ranks, likewise; None without any such ranks.
        branches: what is wrong in branches that the compared steps don't take.
    """
    counts = LayoutCounts(layout.axes, layout.num_microbatches, len(reference.samples[0]) if reference.samples else 0)
    sides = _Sides(layout, reference, counts, Tolerances(gradient_tolerance, later_tolerance), DiagnosisContext({}))
    initial = _compare_initial(sides)
    initial_wrong = any_wrong(initial) or any(copies.what == INITIAL for copies in layout.unequal)
    context = DiagnosisContext({}, bool(_sample_findings(sides, num_steps=1)), initial_wrong)
    by_tokens = None if by_context is None or context.root_fault() else ContextContributions(by_context, counts)
    sides = replace(sides, context=context, by_tokens=by_tokens)
    gathered = weights_left_gathered(layout, reference)
    step_1 = _compare_step_1(sides, variants, gathered)
    first = _compare_first_update(sides, step_1) if layout.after_first and reference.after_first else {}
    samples = _sample_findings(sides)
    later_wrong = step_1.root_fault or ("wrong samples" if samples else "") or _wrong_updates(first)
    later_wrong = later_wrong or ("copies of shared parameters that differ within a rank" if layout.unequal else "")
    known = step_1.known
    if known is None and not step_1.root_fault and not samples and not layout.unequal and not _is_explained(first):
        known = _known_later(sides, step_1.norms, variants)
        first = first if known is None else as_consequences(first, known)
    final = _compare_final(sides, step_1, first, later_wrong if known is None else known.name)
    update_wrong = bool(later_wrong) or any_wrong(final)
    result = ProofResult(
        axes=layout.axes,
        num_microbatches=layout.num_microbatches,
        gradient_tolerance=gradient_tolerance,
        later_tolerance=later_tolerance,
        num_steps=len(reference.losses),
        findings=audit(layout, reference, same_names=gathered is None),
        branches=tuple(branches) if gathered is None else (),
        samples=samples,
        losses=losses_as_consequence(_compare_losses(sides, update_wrong), known),
        grad_norm=norms_as_consequence(explain_later_norms(step_1.norms, update_wrong=update_wrong), known),
        known=() if known is None else (known.diagnosis,),
        parameters=_parameters(reference, step_1.gradients, final, initial, first),
    )
    return replace(result, notes=notes_on(result, layout.stages))


def _sample_findings(sides: _Sides, *, num_steps: int | None = None) -> tuple[Diagnosis, ...]:
    layout, reference, batches = sides.layout, sides.reference, sides.reference.samples[:num_steps]
    contents = [steps[:num_steps] for steps in layout.contents]
    return (
        *diagnose_samples(layout.samples, batches, layout.axes, layout.num_microbatches),
        *diagnose_contents(contents, reference.contents, reference.samples, layout.axes),
    )


def _parameters(
    reference: ReferenceEvidence, gradients: Verdicts, final: Verdicts, initial: Verdicts, first: Verdicts
) -> tuple[ParameterResult, ...]:
    def result_of(verdicts: Verdicts, name: str) -> TensorResult | None:
        return verdicts[name].result if name in verdicts else None

    return tuple(
        ParameterResult(
            name=name,
            shape=tuple(value.shape),
            gradient=result_of(gradients, name),
            final=final[name].result,
            initial=result_of(initial, name),
            first=result_of(first, name),
        )
        for name, value in reference.parameters.items()
    )


def _compare_initial(sides: _Sides) -> Verdicts:
    if not sides.layout.initial:
        return {}
    references = to_arrays(sides.reference.initial)
    verdicts = compare_tensors(sides.layout.initial, references, sides.counts, sides.tolerances.first)
    context = DiagnosisContext(references)
    return {
        name: verdict if verdict.result.ok else verdict.with_diagnosis(diagnose_initial(verdict.suspect, context))
        for name, verdict in verdicts.items()
    }


def _compare_gradients(sides: _Sides) -> Verdicts:
    layout, counts = sides.layout, sides.counts
    references, grid = (to_arrays(sides.reference.gradients), (counts.axes.data_parallel(), counts.num_microbatches))
    contributions = {
        name: value
        for name, value in to_arrays(sides.reference.partial_gradients).items()
        if name in references and value.shape == (*grid, *references[name].shape)
    }
    shards = {
        name: with_empty_shards(found, layout.parameters.get(name, [])) for name, found in layout.gradients.items()
    }
    verdicts = compare_tensors(shards, references, counts, sides.tolerances.first, contributions)
    context = replace(sides.context, references=references, shared=_stage_contributions(sides, references))
    for name, verdict in verdicts.items():
        if not verdict.result.ok:
            absent = missing_gradient(layout.gradients.get(name, []), layout.parameters.get(name, []), counts)
            verdicts[name] = verdict.with_diagnosis(absent or diagnose_gradient(verdict.suspect, context))
    if sides.by_tokens is not None:
        verdicts = sides.by_tokens.diagnose_gradients(verdicts, context)
    verdicts = name_accumulated_sums(narrow_to_axis(verdicts, counts), counts)
    return locate_stages(narrow_to_experts(verdicts, layout.experts), layout.stages)


def _stage_contributions(sides: _Sides, references: Mapping[str, Array]) -> StageContributions | None:
    stages = sides.layout.stages
    if stages is None:
        return None
    by_stage = to_arrays(sides.reference.stage_gradients)
    shape = {name: (len(stages.ranks), *expected.shape) for name, expected in references.items()}
    valid = {name: value for name, value in by_stage.items() if value.shape == shape.get(name)}
    return StageContributions(stages, valid)


def with_empty_shards(gradient: list[RecordedShard], parameter: list[RecordedShard]) -> list[RecordedShard]:
    """Add empty gradient shards for empty parameter shards, whose gradient may be None."""
    have = {shard.rank for shard in gradient}
    return gradient + [shard for shard in parameter if shard.rank not in have and not shard.value.numel()]


def missing_gradient(
    gradient: list[RecordedShard], parameter: list[RecordedShard], counts: LayoutCounts
) -> Diagnosis | None:
    """Diagnose ranks that hold a parameter shard but no gradient at all for it."""
    holders = {shard.rank for shard in parameter if shard.value.numel()}
    lacking = holders - {shard.rank for shard in gradient}
    if not lacking:
        return None
    scope = scope_words(lacking, holders, counts.axes)
    whose = "this parameter" if lacking == holders else f"{rank_words(lacking)}'s shard of it"
    return Diagnosis(FaultKind.ZERO, f"no gradient {scope}", f"no gradient reached {whose}")


def narrow_to_axis(verdicts: Verdicts, counts: LayoutCounts) -> Verdicts:
    """Attribute a wrong factor to the axis along which exactly the affected parameters are replicated."""
    members: dict[float, set[str]] = {}
    for name, verdict in verdicts.items():
        if verdict.result.diagnosis is not None and verdict.result.diagnosis.factor is not None:
            members.setdefault(verdict.result.diagnosis.factor, set()).add(name)
    narrowed = dict(verdicts)
    for factor, names in members.items():
        fitting = [
            axis
            for axis, size in counts.axes.used().items()
            if (close(factor, size, counts.rounding) or close(factor, 1 / size, counts.rounding))
            and names == {name for name, verdict in verdicts.items() if axis in verdict.result.replicated}
        ]
        if len(fitting) == 1 and len(names) < len(verdicts):
            for name in names:
                blamed = scale_diagnosis(factor, verdicts[name].suspect.scope_text(), counts, only_axis=fitting[0])
                scope = f"{blamed.cause}, on exactly the parameters replicated over {fitting[0]}"
                narrowed[name] = verdicts[name].with_diagnosis(replace(blamed, cause=scope))
    return narrowed


@dataclass(frozen=True)
class _Step1:
    """Verdicts on step 1 before the first update."""

    gradients: Verdicts
    norms: SeriesResult
    root_fault: str
    """Fault that makes the first update wrong, or an empty string."""
    known: KnownFault | None = None
    """Known fault that explains all wrong values."""

    def own_fault(self, name: str) -> str:
        return "its wrong gradient" if name in self.gradients and not self.gradients[name].result.ok else ""

    def is_step_skipped(self) -> bool:
        """Return whether step 1 skips its update because of a non-finite norm."""
        return self.norms.diagnosis is not None and self.norms.diagnosis.kind is FaultKind.NON_FINITE


def _compare_step_1(sides: _Sides, variants: Variants | None, gathered: KnownFault | None) -> _Step1:
    gradients, root_fault = _compare_gradients(sides), sides.context.root_fault()
    known = gathered
    if not root_fault and known is None:
        losses = _compare_losses(sides, update_wrong=False)
        known = known_fault_of_step_1(gradients, losses, sides.layout, sides.reference, sides.counts, variants)
    if known is not None:
        gradients, root_fault = as_consequences(gradients, known), known.name
    norms = _compare_norms(sides, gradients)
    wrong = root_fault or ("wrong gradients of other parameters" if any_wrong(gradients) else "")
    return _Step1(gradients, norms, wrong or ("a wrong gradient norm" if norms.diagnosis is not None else ""), known)


def _known_later(sides: _Sides, norms: SeriesResult, variants: Variants | None) -> KnownFault | None:
    references = to_arrays(sides.reference.parameters)
    final = compare_tensors(sides.layout.parameters, references, sides.counts, sides.tolerances.later)
    losses = compare_series(
        sides.layout.losses, sides.reference.losses, sides.counts.axes.num_ranks(), sides.tolerances
    )
    return known_fault_of_later_steps(final, losses, norms, sides.reference, sides.counts, variants)


def _compare_norms(sides: _Sides, gradients: Verdicts) -> SeriesResult:
    num_ranks = sides.counts.axes.num_ranks()
    norms = compare_series(sides.layout.grad_norms, sides.reference.grad_norms, num_ranks, sides.tolerances)
    assemblies = {name: verdict.suspect.assembly for name, verdict in gradients.items()}
    wrong = any_wrong(gradients)
    stages, experts = sides.layout.stages, sides.layout.experts
    return explain_first_norm(norms, assemblies, sides.counts, stages, experts, gradients_wrong=wrong)


def _compare_first_update(sides: _Sides, step_1: _Step1) -> Verdicts:
    references = to_arrays(sides.reference.after_first)
    verdicts = compare_tensors(sides.layout.after_first, references, sides.counts, sides.tolerances.later)
    if not any_wrong(verdicts):
        return verdicts
    last = compare_tensors(
        sides.layout.parameters, to_arrays(sides.reference.parameters), sides.counts, sides.tolerances.later
    )
    for name, verdict in verdicts.items():
        if not verdict.result.ok:
            history = UpdateHistory(
                initial=_initial(sides, name, verdict.suspect.expected),
                last=last[name].suspect.assembly if name in last else None,
                own_fault=step_1.own_fault(name),
                root_fault=step_1.root_fault,
                is_step_skipped=step_1.is_step_skipped(),
            )
            context = replace(sides.context, references=references)
            verdicts[name] = verdict.with_diagnosis(diagnose_update(verdict.suspect, context, history))
    if sides.context.root_fault():
        return verdicts
    return explain_counts(verdicts, sides.layout, sides.reference, step_1.known)


def _is_explained(verdicts: Verdicts) -> bool:
    """Return whether any wrong update has a cause of its own."""
    found = [verdict.result.diagnosis for verdict in verdicts.values()]
    return any(diagnosis is not None and diagnosis.kind not in UNKNOWN for diagnosis in found)


def _wrong_updates(verdicts: Verdicts) -> str:
    wrong = [name for name, verdict in verdicts.items() if not verdict.result.ok]
    return f"the wrong update of {first_words(wrong, 2)}" if wrong else ""


def _compare_final(sides: _Sides, step_1: _Step1, first: Verdicts, later_wrong: str) -> Verdicts:
    references = to_arrays(sides.reference.parameters)
    verdicts = compare_tensors(sides.layout.parameters, references, sides.counts, sides.tolerances.later)
    context = replace(sides.context, references=references)
    right = "the gradients and the norm of step 1 are correct"
    for name, verdict in verdicts.items():
        if verdict.result.ok:
            continue
        own = step_1.own_fault(name)
        if not own and name in first and not first[name].result.ok:
            own = "its wrong update in step 1"
        history = UpdateHistory(
            initial=_initial(sides, name, verdict.suspect.expected),
            own_fault=own,
            root_fault=later_wrong,
            is_step_skipped=step_1.is_step_skipped(),
            known_right="everything is correct up to the first update" if first else right,
        )
        verdicts[name] = verdict.with_diagnosis(diagnose_update(verdict.suspect, context, history))
    return verdicts if first else _mark_feedback(verdicts)


def _mark_feedback(verdicts: Verdicts) -> Verdicts:
    """Mark unrecognised faults as possible consequences of a recognised one, if step 1 was not recorded."""
    recognised = {FaultKind.NOT_UPDATED, FaultKind.STEP_SCALED, FaultKind.WEIGHT_DECAY, FaultKind.MISPLACED}
    unknown = {FaultKind.UNRECOGNISED, FaultKind.REPLICAS_DIFFER}
    found = {name: verdict.result.diagnosis for name, verdict in verdicts.items()}
    kinds = {name: diagnosis.kind for name, diagnosis in found.items() if diagnosis is not None}
    blamed = _wrong_updates({name: verdicts[name] for name, kind in kinds.items() if kind in recognised})
    result = dict(verdicts)
    for name in [name for name, kind in kinds.items() if blamed and kind in unknown]:
        symptom, cause = f"wrong {verdicts[name].suspect.scope_text()}", f"may follow from {blamed}"
        result[name] = verdicts[name].with_diagnosis(Diagnosis(FaultKind.CONSEQUENCE, symptom, cause))
    return result


def _initial(sides: _Sides, name: str, expected: Array) -> Array | None:
    initial: Mapping[str, Tensor] = sides.reference.initial
    if name not in initial or tuple(initial[name].shape) != expected.shape:
        return None
    return to_arrays({name: initial[name]})[name]


def _compare_losses(sides: _Sides, update_wrong: bool) -> SeriesResult:
    counts, reference = sides.counts, sides.reference
    losses = compare_series(sides.layout.losses, reference.losses, counts.axes.num_ranks(), sides.tolerances)
    partial, grid = reference.partial_losses, (counts.axes.data_parallel(), counts.num_microbatches)
    contributions = None if partial is None or tuple(partial.shape) != grid else to_arrays({"": partial})[""]
    fault = sides.context.root_fault()
    losses = explain_losses(losses, contributions, counts, root_fault=fault, update_wrong=update_wrong)
    return losses if sides.by_tokens is None else sides.by_tokens.diagnose_loss(losses)
