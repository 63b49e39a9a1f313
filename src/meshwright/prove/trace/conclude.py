"""Find the place at which a failing step goes wrong, and its cause there, in a second pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from meshwright.config.schema import RunConfig
from meshwright.features.registry import plan_features
from meshwright.models.contract.family import TrainingData
from meshwright.nn.step_handles import auxiliary_losses
from meshwright.plan.run_plan import RunPlan
from meshwright.prove.explain.explain import ordered
from meshwright.prove.judge.judge import Sides
from meshwright.prove.judge.tensors import LayoutCounts, factor_cause, to_arrays
from meshwright.prove.placement import ExpertPlacement, StagePlacement, context_placement_of
from meshwright.prove.record.reference_run import PlainModel
from meshwright.prove.result import (
    UNKNOWN,
    Diagnosis,
    FaultKind,
    Finding,
    ProofResult,
    StepValue,
    TensorResult,
    index_words,
    number_words,
    rank_words,
    scope_words,
)
from meshwright.prove.trace.attention_parts import explain_attention
from meshwright.prove.trace.expert_parts import COMBINE_BACKWARD, RIGHT, ExpertParts
from meshwright.prove.trace.first_difference import TOLERANCE, FirstDifference, Trace, grid
from meshwright.prove.trace.foreign_experts import explain_experts
from meshwright.prove.trace.module_parts import FLOAT32
from meshwright.prove.trace.module_parts import RELATIONS as MODULE_RELATIONS
from meshwright.prove.trace.probe import GRADIENT, LAYER, MODEL, RankTrace, ReferenceTrace, trace_reference
from meshwright.prove.trace.relations import relate
from meshwright.prove.trace.router_loss import explain_balance
from meshwright.units import join_words

NOTHING_DIFFERS = "no value of the forward or backward differs in step {}"
ROUNDINGS = 512.0
"""Rounding errors of the precision of a run that a value may differ by."""


Result = TypeVar("Result", StepValue, TensorResult)


@dataclass(frozen=True)
class Step:
    """The step in which values go wrong."""

    number: int
    stages: StagePlacement | None
    experts: ExpertPlacement | None
    counts: LayoutCounts


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
    evidence, context = sides.evidence, context_placement_of(plan)
    reference = trace_reference(plain, data, step=step, weights=sides.weights, context=context)
    trace = Trace(
        [{microbatch: to_arrays(values) for microbatch, values in rank.values.items()} for rank in ranks],
        reference,
        config.mesh.axes(),
        repeated={name for rank in ranks for name in rank.repeated},
        tolerance=max(TOLERANCE, ROUNDINGS * torch.finfo(getattr(torch, config.train.precision)).eps),
    )
    place = locate(trace, Step(step, evidence.stages, evidence.experts, sides.counts))
    logged = _logged_losses(reference, sides, step) if place is None else None
    return place if logged is None else Diagnosis(FaultKind.FORWARD, NOTHING_DIFFERS.format(step), logged)


def _logged_losses(source: ReferenceTrace, sides: Sides, step: int) -> str | None:
    """Return the cause of a wrong loss whose gradients are right, if it is a factor of the auxiliary losses in it."""
    parts: dict[str, float] = defaultdict(float)
    for _, handle in auxiliary_losses(source.plain.module):
        if (total := handle.take()) is not None:
            parts[handle.name] += float(total)
    losses, due = sides.evidence.series("loss", step), sides.references[step - 1].loss  # which forgets those parts
    for names in ([*parts], *([name] for name in parts)):
        part = sum(parts[name] for name in names)
        if abs(part) <= RIGHT * abs(due):
            continue
        factors = [1.0 + (loss - due) / part for loss in losses]
        factor = round(factors[0], 6) + 0.0
        if factor == 1.0 or max(abs(each - factor) for each in factors) > FLOAT32 * abs(factor) + RIGHT:
            continue
        cause = "they are not added" if factor == 0.0 else factor_cause(factor, sides.counts, max_rarity=2)
        causes = [one for one in (cause, "added twice" if factor == 2.0 else "") if one]
        if causes:
            what = f"the {' and '.join(names)} loss{'es' if len(names) > 1 else ''} {number_words(factor)} times"
            return f"the loss that is reported contains {what}: {', or '.join(causes)}; gradients are right"
    return None


def with_place(result: ProofResult, place: Diagnosis | None, plan: RunPlan) -> ProofResult:
    """Return the result with the place of the fault; what was not recognised in its step follows from it. Without a
    place, the result says what the plan has and the second pass had not."""
    step = result.locate_step
    if step is None:
        return result
    if place is None and any(one.about == "loss" and one.step == step for one in result.findings):
        cause = "the outputs are right, so the loss is computed wrongly from them: the loss, its targets or its divisor"
        place = Diagnosis(FaultKind.FORWARD, NOTHING_DIFFERS.format(step), cause)
    if place is None:
        without = [next(one.page(plan))[0] for one in plan_features(plan=plan) if one.plan_in_trace(plan) != plan]
        where = f"{step}, in a pass without {' and '.join(without)}" if without else f"{step}"
        note = f"no activation and no gradient of one differs in step {where}: check "
        note += "".join(f"{one}, " for one in without)
        notes = (f"{note}how gradients of parameters are computed from them, and their reductions", *result.notes)
        return replace(result, notes=notes, locate_step=None)
    findings = [Finding("forward", place, step=step)]
    for one in result.findings:
        is_same = COMBINE_BACKWARD in place.cause and COMBINE_BACKWARD in one.diagnosis.cause
        is_unknown = one.diagnosis.kind in UNKNOWN or place.kind is FaultKind.FORWARD or is_same
        follows = one.about in ("loss", "gradient") and one.step >= step and is_unknown
        findings.append(replace(one, diagnosis=_follows(one.diagnosis)) if follows else one)
    return replace(
        result,
        findings=ordered(findings),
        losses=tuple(_explained(one) for one in result.losses),
        parameters=tuple(
            one if one.gradient is None else replace(one, gradient=_explained(one.gradient))
            for one in result.parameters
        ),
        locate_step=None,
    )


def _explained(one: Result) -> Result:
    """Return a wrong loss or gradient of no known cause as a consequence."""
    unknown = one.diagnosis is not None and one.diagnosis.kind in UNKNOWN
    return replace(one, diagnosis=_follows(one.diagnosis)) if unknown and one.diagnosis is not None else one


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
    relation = _order(first, trace) or _by_parts(first, trace, step) or relate(first.wrong, trace)
    if relation is None and first.partial_before:
        relation = f"the sum over tp is missing: the {first.partial_before} is right only once it is summed"
    between = _between(first, step, is_named=relation is not None)
    cause = f"{relation}; {between}" if relation else between
    where = _where(first, trace)
    error = max(value.error for value in first.wrong)
    detail = f"in step {step.number}: relative error {error:.1e}" + (f", {where}" if where else "")
    kind = FaultKind.BACKWARD if first.is_gradient else FaultKind.FORWARD
    return Diagnosis(kind, symptom, cause, detail)


def _by_parts(first: FirstDifference, trace: Trace, step: Step) -> str | None:
    """Run the module whose inputs agree and whose output doesn't once more, by parts."""
    for one in (first, trace.summed(first)) if trace.axes.size("tp") > 1 else (first,):
        balance = partial(explain_balance, counts=step.counts)
        found = explain_attention(one, trace) or relate(one.wrong, trace, [*MODULE_RELATIONS, balance])
        if found is None and step.experts is not None:
            foreign = partial(explain_experts, placement=step.experts)
            found = ExpertParts(one, trace, step.experts, step.counts).explain() or relate(one.wrong, trace, [foreign])
        if found is not None:
            return found
    return None


def _order(first: FirstDifference, trace: Trace) -> str | None:
    """Name a module that a rank ran too early."""
    value = first.wrong[0]
    due = list(trace.reference[value.cell])
    later = set(due[due.index(first.name) + 1 :])
    ran = list(trace.ranks[value.rank][value.cell % trace.num_microbatches])
    early = next((name for name in ran[: ran.index(first.name)] if name in later), None)
    return None if early is None else f"{early.rpartition(' of ')[2]} runs before {first.module}"


def _between(first: FirstDifference, step: Step, *, is_named: bool) -> str:
    """Say which code computes the value, from what was compared before it."""
    what, module, is_gradient = first.what.removeprefix(GRADIENT), first.module, first.is_gradient
    before = [name for name in first.right_before if name.startswith(GRADIENT) == is_gradient]
    if sent := _sent(first.name, before[-1] if before else "", step.stages):
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


def _sent(name: str, before: str, stages: StagePlacement | None) -> str | None:
    """Say what is sent between stages, if that is between a wrong value and the last right one."""
    here, there = (_stage_of(one, stages) for one in (name, before))
    if stages is None or here is None or there is None or here == there:
        return None
    is_gradient, is_sent = name.startswith(GRADIENT), stages.ranks[here] != stages.ranks[there]
    receives = f"{'the gradient that' if is_gradient else 'what'} {stages.describe([here])} receives"
    due = here + 1 if is_gradient else here - 1
    if there != due:
        sender = stages.describe([due])
        return f"{receives} from {sender} is wrong: no value of {sender} itself could be compared"
    actions = f": {there}SEND_B and {here}RECV_B" if is_gradient and is_sent else ""
    changed = "or it is changed" if is_gradient else "or is changed"
    return f"{receives} is not what {stages.describe([there])} returns{actions}, {changed} at either end"


def _stage_of(name: str, stages: StagePlacement | None) -> int | None:
    """Return the stage that computes a value of a numbered layer."""
    layer, ranges = LAYER.search(name), () if stages is None else stages.layers
    return next((at for at, layers in enumerate(ranges) if layer is not None and int(layer[1]) in layers), None)


def _where(first: FirstDifference, trace: Trace) -> str:
    """Describe the samples, tokens, heads and features that differ, as far as others don't."""
    found = []
    cells = sorted({value.cell for value in first.wrong})
    if len(cells) < len({value.cell for value in first.compared}):
        samples = [sample for cell in cells for sample in trace.source.samples[cell]]
        found.append(f"in the micro-batch{'es' if len(cells) > 1 else ''} of samples {index_words(samples)}")
    is_wrong = np.zeros(first.wrong[0].full.shape, dtype=bool)
    for value in first.wrong:
        is_wrong[grid(value.index)] |= value.wrong
    dims = ["at rows", "in features"] if is_wrong.ndim == 2 else ["at rows", "at positions", "in heads", "in features"]
    for dim in range(is_wrong.ndim):
        places = np.flatnonzero(is_wrong.any(axis=tuple(other for other in range(is_wrong.ndim) if other != dim)))
        if 0 < len(places) < is_wrong.shape[dim]:
            words = dims[dim] if dim < is_wrong.ndim - 1 else dims[-1]
            found.append(f"{words} {index_words(places.tolist())} of {is_wrong.shape[dim]}")
    return join_words(found) if found else ""
