"""Find the place at which a failing step goes wrong, and its cause there, in a second pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from meshwright.config.schema import RunConfig
from meshwright.models.contract.family import TrainingData
from meshwright.plan.run_plan import RunPlan
from meshwright.prove.explain.explain import ordered
from meshwright.prove.judge.counts import LayoutCounts
from meshwright.prove.judge.judge import Sides
from meshwright.prove.judge.tensors import to_arrays
from meshwright.prove.placement import ExpertPlacement, StagePlacement, context_placement_of
from meshwright.prove.record.reference_run import PlainModel
from meshwright.prove.result import (
    UNKNOWN,
    Diagnosis,
    FaultKind,
    Finding,
    ParameterResult,
    ProofResult,
    StepValue,
    index_words,
    rank_words,
    scope_words,
)
from meshwright.prove.trace.attention_parts import explain_attention, explain_loss
from meshwright.prove.trace.expert_parts import COMBINE_BACKWARD, ExpertParts, foreign_experts, logged_losses
from meshwright.prove.trace.first_difference import TOKENS, TOLERANCE, FirstDifference, Trace
from meshwright.prove.trace.module_parts import RELATIONS as MODULE_RELATIONS
from meshwright.prove.trace.probe import GRADIENT, LAYER, MODEL, RankTrace, ReferenceTrace, trace_reference
from meshwright.prove.trace.relations import parts_of, relate
from meshwright.units import join_words

ROUNDINGS = 512.0
"""Rounding errors of the precision of a run that a value may differ by."""


@dataclass(frozen=True)
class Step:
    """The step in which values go wrong."""

    number: int
    samples: tuple[tuple[int, ...], ...] = ()
    """Samples of each cell."""
    stages: StagePlacement | None = None
    experts: ExpertPlacement | None = None
    counts: LayoutCounts | None = None


def find_place(
    config: RunConfig,
    plan: RunPlan,
    ranks: Sequence[RankTrace],
    data: TrainingData,
    plain: PlainModel,
    sides: Sides,
    *,
    step: int,
) -> Diagnosis | None:
    """Return the place at which a step goes wrong on the ranks; None if no value that is compared does."""
    axes = config.mesh.axes()
    context = context_placement_of(plan, axes)
    reference = trace_reference(plain, data, step=step, weights=sides.weights, context=context)
    evidence = sides.evidence
    found = Step(step, reference.samples, evidence.stages, evidence.experts, sides.counts)
    place = locate(trace_of(config, ranks, reference), found)
    logged = logged_losses(reference, sides, step) if place is None else None
    symptom = f"no value of the forward or backward differs in step {step}"
    return place if logged is None else Diagnosis(FaultKind.FORWARD, symptom, logged)


def trace_of(config: RunConfig, ranks: Sequence[RankTrace], reference: ReferenceTrace) -> Trace:
    """Return the values of both sides."""
    return Trace(
        [{microbatch: to_arrays(values) for microbatch, values in rank.values.items()} for rank in ranks],
        [to_arrays(values) for values in reference.values],
        config.mesh.axes(),
        tokens={cell: [one.numpy() for one in tokens] for cell, tokens in reference.tokens.items()},
        source=reference,
        repeated={name for rank in ranks for name in rank.repeated},
        tolerance=max(TOLERANCE, ROUNDINGS * torch.finfo(getattr(torch, config.train.precision)).eps),
    )


def with_place(result: ProofResult, place: Diagnosis | None) -> ProofResult:
    """Return the result with the place of the fault; what was not recognised in its step follows from it."""
    step = result.locate_step
    if step is None:
        return result
    if place is None and any(one.about == "loss" and one.step == step for one in result.findings):
        symptom = f"no value of the forward or backward differs in step {step}"
        cause = "the outputs are right, so the loss is computed wrongly from them: the loss, its targets or its divisor"
        place = Diagnosis(FaultKind.FORWARD, symptom, cause)
    if place is None:
        note = f"no activation and no gradient of one differs in step {step}: check how gradients of parameters are "
        return replace(
            result, notes=(f"{note}computed from them, and their reductions", *result.notes), locate_step=None
        )
    findings = [Finding("forward", place, step=step)]
    for one in result.findings:
        is_same = COMBINE_BACKWARD in place.cause and COMBINE_BACKWARD in one.diagnosis.cause
        is_unknown = one.diagnosis.kind in UNKNOWN or place.kind is FaultKind.FORWARD or is_same
        follows = one.about in ("loss", "gradient") and one.step >= step and is_unknown
        findings.append(replace(one, diagnosis=_follows(one.diagnosis)) if follows else one)
    return replace(
        result,
        findings=ordered(findings),
        losses=tuple(_series(one) for one in result.losses),
        parameters=tuple(_parameter(one) for one in result.parameters),
        locate_step=None,
    )


def _series(step: StepValue) -> StepValue:
    unknown = step.diagnosis is not None and step.diagnosis.kind in UNKNOWN
    return replace(step, diagnosis=_follows(step.diagnosis)) if unknown and step.diagnosis is not None else step


def _parameter(parameter: ParameterResult) -> ParameterResult:
    gradient = parameter.gradient
    if gradient is None or gradient.diagnosis is None or gradient.diagnosis.kind not in UNKNOWN:
        return parameter
    return replace(parameter, gradient=replace(gradient, diagnosis=_follows(gradient.diagnosis)))


def _follows(found: Diagnosis) -> Diagnosis:
    return Diagnosis(FaultKind.CONSEQUENCE, found.symptom, "follows from the first value that differs", found.detail)


def locate(trace: Trace, step: Step) -> Diagnosis | None:
    """Return the place and the kind of the first difference; None if there is none."""
    first = trace.first_difference()
    if first is None:
        return None
    wrong, having = ({value.rank for value in values} for values in (first.wrong, first.compared))
    scope = scope_words(wrong, having, trace.axes)
    if wrong == having and len(having) < trace.axes.num_ranks():
        scope = f"on {rank_words(wrong)}"
    symptom = f"the first value that differs is the {first.name}, {scope}"
    relation = _order(first, trace) or _by_parts(first, trace, step)
    relation = relation or relate(first.wrong, trace, MODULE_RELATIONS) or relate(first.wrong, trace)
    relation = relation or _unreduced(first)
    between = _between(first, step, is_named=relation is not None)
    cause = f"{relation}; {between}" if relation else between
    where = _where(first, step)
    error = max(value.error for value in first.wrong)
    detail = f"in step {step.number}: relative error {error:.1e}" + (f", {where}" if where else "")
    kind = FaultKind.BACKWARD if first.name.startswith(GRADIENT) else FaultKind.FORWARD
    return Diagnosis(kind, symptom, cause, detail)


def _by_parts(first: FirstDifference, trace: Trace, step: Step) -> str | None:
    """Run the module whose inputs agree and whose output doesn't once more, by parts."""
    for one in (first, trace.summed(first)):
        found = explain_attention(one, trace) or foreign_experts(one, trace)
        if found is None and step.experts is not None and step.counts is not None:
            found = ExpertParts(one, trace, step.experts, step.counts).explain()
        if found is not None:
            return found
    return explain_loss(first, trace)


def _order(first: FirstDifference, trace: Trace) -> str | None:
    """Name a module that a rank ran too early."""
    value = first.wrong[0]
    due = list(trace.reference[value.cell])
    later = set(due[due.index(first.name) + 1 :])
    ran = list(trace.ranks[value.rank][value.cell % trace.num_microbatches])
    early = next((name for name in ran[: ran.index(first.name)] if name in later), None)
    return None if early is None else f"{_module(early)} runs before {_module(first.name)}"


def _module(name: str) -> str:
    return name.removeprefix(GRADIENT).partition(" of ")[2]


def _unreduced(first: FirstDifference) -> str | None:
    """Name the partial sum that was not reduced before this value was computed from it."""
    partial = first.partial_before
    return f"the sum over tp is missing: the {partial} is right only once it is summed" if partial else None


def _between(first: FirstDifference, step: Step, *, is_named: bool) -> str:
    """Say which code computes the value, from what was compared before it."""
    is_gradient, what = first.name.startswith(GRADIENT), first.name.removeprefix(GRADIENT).partition(" ")[0]
    module, before = _module(first.name), [n for n in first.right_before if n.startswith(GRADIENT) == is_gradient]
    if sent := _sent(first.name, before[-1] if before else "", step):
        return sent
    if is_gradient:
        if what != "output" and f"{GRADIENT}output of {module}" in before:
            return f"the gradient that {module} is given is right, so the fault is in its backward"
        if not before:
            unnamed = "" if is_named else ": the loss, its targets or its divisor, or their backward"
            return f"all values of the forward are right{unnamed}"
        return f"the {before[-1]} is right: look at the backward between them"
    if what == "output" and module != MODEL:
        if f"input of {module}" in before or f"queries of {module}" in before:
            if module.endswith(".experts"):  # which also takes choices and routing weights
                return f"the tokens that {module} takes are right: the fault is in it, its choices or routing weights"
            return f"what {module} takes is right, so the fault is in it"
        return f"{module}, or what it takes"
    if what in ("queries", "keys", "values"):
        return f"the projection is right: look at what is done to {what} before attention"
    return f"the {before[-1]} is right: look at what is computed between them" if before else f"what {module} is given"


def _sent(name: str, before: str, step: Step) -> str | None:
    """Say what is sent between stages, if that is between a wrong value and the last right one."""
    here, there, stages = _stage_of(name, step), _stage_of(before, step), step.stages
    if stages is None or here is None or there is None or here == there:
        return None
    due = here + 1 if name.startswith(GRADIENT) else here - 1
    if there != due:
        what = "the gradient that" if name.startswith(GRADIENT) else "what"
        words = f"{what} {_stage(here, step)} receives from {_stage(due, step)} is wrong"
        return f"{words}: no value of {_stage(due, step)} itself could be compared"
    if not name.startswith(GRADIENT):
        return (
            f"what {_stage(here, step)} receives is not what {_stage(there, step)} returns, or is changed at either end"
        )
    words = f"the gradient that {_stage(here, step)} receives is not what {_stage(there, step)} returns"
    is_sent = stages.ranks[here] != stages.ranks[there]
    return words + (f": {there}SEND_B and {here}RECV_B" if is_sent else "") + ", or it is changed at either end"


def _stage_of(name: str, step: Step) -> int | None:
    """Return the stage that computes a value of a numbered layer."""
    layer = LAYER.search(name)
    for stage, layers in enumerate(step.stages.layers if step.stages is not None else ()):
        if layer is not None and int(layer[1]) in layers:
            return stage
    return None


def _stage(number: int, step: Step) -> str:
    assert step.stages is not None, "only a pipeline has stages"
    return step.stages.describe([number])


def _where(first: FirstDifference, step: Step) -> str:
    """Describe the samples, tokens, heads and features that differ, as far as others don't."""
    found = []
    cells = sorted({value.cell for value in first.wrong})
    if len(cells) < len({value.cell for value in first.compared}):
        samples = [sample for cell in cells for sample in step.samples[cell]]
        found.append(f"in the micro-batch{'es' if len(cells) > 1 else ''} of samples {index_words(samples)}")
    for dim, places, size in parts_of(first.wrong):
        if 0 < len(places) < size:
            found.append(f"{_dim_words(first, dim)} {index_words(places.tolist())} of {size}")
    return join_words(found) if found else ""


def _dim_words(first: FirstDifference, dim: int) -> str:
    num_dims = first.wrong[0].observed.ndim
    if dim == 0:
        return "at rows"
    if dim == TOKENS and num_dims > 2:
        return "at positions"
    return "in heads" if dim == 2 and num_dims == 4 else "in features"
