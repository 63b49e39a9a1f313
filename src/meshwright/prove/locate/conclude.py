"""Decide whether a failed proof needs a second pass, and add what the pass finds to its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwright.config.schema import RunConfig
from meshwright.models.contract.family import TrainingData
from meshwright.plan.run_plan import RunPlan
from meshwright.prove.compare.result import (
    Diagnosis,
    FaultKind,
    ParameterResult,
    ProofResult,
    SeriesResult,
    TensorResult,
)
from meshwright.prove.compare.tensor_verdict import to_arrays
from meshwright.prove.context_placement import context_placement_of
from meshwright.prove.diagnose.notes import LOSS_IS_RIGHT
from meshwright.prove.diagnose.suspect import UNKNOWN
from meshwright.prove.locate.first_difference import Forward
from meshwright.prove.locate.layout_pass import RankPass
from meshwright.prove.locate.place import Step, locate
from meshwright.prove.locate.reference_pass import reference_activations
from meshwright.prove.stage_placement import stage_placement_of

ROUNDED = 1e-5
"""Relative error of gradients up to which a forward that computes in float32 may explain them."""


def step_to_locate(result: ProofResult) -> int | None:
    """Return the step whose forward goes wrong for an unknown reason, or None if there is none.

    Rounding errors of float32 may cancel in the loss, but not in the gradients.
    """
    loss = result.losses.diagnosis
    if result.samples or any(p.initial is not None and not p.initial.ok for p in result.parameters):
        return None
    if loss is None or loss.kind not in UNKNOWN:
        return 1 if loss is None and _are_rounded(result) else None
    return next(step.step for step in result.losses.steps if not step.ok)


def _are_rounded(result: ProofResult) -> bool:
    wrong = [p.gradient for p in result.parameters if p.gradient is not None and not p.gradient.ok]
    unknown = [one for one in wrong if one.diagnosis is not None and one.diagnosis.kind in UNKNOWN]
    return bool(unknown) and all(one.error.relative <= ROUNDED for one in wrong)


def find_place(
    config: RunConfig,
    data: TrainingData,
    plan: RunPlan,
    ranks: Sequence[RankPass],
    *,
    step: int,
) -> Diagnosis | None:
    """Return the place at which the ranks' forward of a step goes wrong; None if no value that is compared does."""
    axes = config.mesh.axes()
    reference = reference_activations(config, data, step=step, context=context_placement_of(plan, axes))
    forward = Forward(
        [{microbatch: to_arrays(values) for microbatch, values in rank.values.items()} for rank in ranks],
        [to_arrays(values) for values in reference.values],
        axes,
        tokens={cell: [one.numpy() for one in tokens] for cell, tokens in reference.tokens.items()},
        epsilons=reference.epsilons,
        narrow=[rank.narrow for rank in ranks],
    )
    return locate(forward, Step(step, reference.samples, stage_placement_of(plan)))


def with_place(result: ProofResult, place: Diagnosis | None) -> ProofResult:
    """Return the result with the place of the fault, if there is one; what was not recognised follows from it."""
    if place is None and result.losses.diagnosis is None:
        return result
    if place is None:
        symptom = f"no value of the forward differs in step {step_to_locate(result)}"
        cause = "the outputs are right, so the loss is computed wrongly from them: the loss, its targets or its divisor"
        place = Diagnosis(FaultKind.FORWARD, symptom, cause)
    return replace(
        result,
        known=(*result.known, place),
        losses=_series(result.losses),
        grad_norm=_series(result.grad_norm),
        parameters=tuple(_parameter(parameter) for parameter in result.parameters),
        notes=tuple(note for note in result.notes if note != LOSS_IS_RIGHT),
    )


def _series(series: SeriesResult) -> SeriesResult:
    return replace(series, diagnosis=_follows(series.diagnosis))


def _parameter(parameter: ParameterResult) -> ParameterResult:
    def changed(tensor: TensorResult | None) -> TensorResult | None:
        return None if tensor is None else replace(tensor, diagnosis=_follows(tensor.diagnosis))

    final = changed(parameter.final)
    assert final is not None
    return replace(parameter, gradient=changed(parameter.gradient), first=changed(parameter.first), final=final)


def _follows(found: Diagnosis | None) -> Diagnosis | None:
    if found is None or found.kind not in UNKNOWN:
        return found
    return Diagnosis(FaultKind.CONSEQUENCE, found.symptom, "follows from the forward that goes wrong", found.detail)
