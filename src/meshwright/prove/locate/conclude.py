"""Decide whether a failed proof needs a second pass, and add what the pass finds to its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

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
from meshwright.prove.diagnose.suspect import UNKNOWN
from meshwright.prove.locate.first_difference import Forward
from meshwright.prove.locate.place import Step, locate
from meshwright.prove.locate.reference_pass import reference_activations
from meshwright.prove.stage_placement import stage_placement_of


def step_to_locate(result: ProofResult) -> int | None:
    """Return the step whose forward goes wrong for an unknown reason, or None if there is none."""
    loss = result.losses.diagnosis
    if loss is None or loss.kind not in UNKNOWN or result.samples:
        return None
    if any(p.initial is not None and not p.initial.ok for p in result.parameters):
        return None
    return next(step.step for step in result.losses.steps if not step.ok)


def find_place(
    config: RunConfig,
    data: TrainingData,
    plan: RunPlan,
    ranks: Sequence[dict[int, dict[str, Tensor]]],
    *,
    step: int,
) -> Diagnosis:
    """Return the place at which the ranks' forward of a step goes wrong."""
    axes = config.mesh.axes()
    reference = reference_activations(config, data, step=step, context=context_placement_of(plan, axes))
    forward = Forward(
        [{microbatch: to_arrays(values) for microbatch, values in rank.items()} for rank in ranks],
        [to_arrays(values) for values in reference.values],
        axes,
        tokens={cell: [one.numpy() for one in tokens] for cell, tokens in reference.tokens.items()},
        epsilons=reference.epsilons,
    )
    return locate(forward, Step(step, reference.samples, stage_placement_of(plan)))


def with_place(result: ProofResult, place: Diagnosis) -> ProofResult:
    """Return the result with the place of the fault; what was not recognised follows from it."""
    return replace(
        result,
        known=(*result.known, place),
        losses=_series(result.losses),
        grad_norm=_series(result.grad_norm),
        parameters=tuple(_parameter(parameter) for parameter in result.parameters),
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
