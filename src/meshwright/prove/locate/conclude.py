"""Decide whether a failed proof needs a second pass, and add what the pass finds to its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.models.contract.family import TrainingData
from meshwright.models.contract.task import Reference
from meshwright.nn.attention.mask_spec import TokenLayout
from meshwright.nn.attention.positions import shard_indices
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
from meshwright.prove.diagnose.notes import LOSS_IS_RIGHT
from meshwright.prove.diagnose.phrases import index_words, scope_words
from meshwright.prove.diagnose.suspect import UNKNOWN
from meshwright.prove.locate.first_difference import TOKENS, FirstDifference, Forward
from meshwright.prove.locate.layout_pass import RankPass
from meshwright.prove.locate.narrow_operators import narrow_words
from meshwright.prove.locate.probe import Values, probed
from meshwright.prove.locate.relations import explain, parts_of
from meshwright.prove.placement import ContextPlacement, StagePlacement, context_placement_of, stage_placement_of
from meshwright.prove.record.reference_run import build_reference, cells, compute_reference, count_over_batch
from meshwright.units import join_words

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


@dataclass(frozen=True)
class ReferencePass:
    """Values of a step's forward in one process."""

    values: list[Values]
    """Values of each micro-batch of each data-parallel rank, in the order of `cells`. Modules that run several times
    are left out, since the order of their calls may be that of a set, which differs between processes."""
    samples: tuple[tuple[int, ...], ...]
    """Samples of each cell."""
    tokens: dict[int, list[Tensor]]
    """Per cell, the positions [t] or [b, t] of the tokens on each context-parallel rank; empty without any."""
    epsilons: dict[str, float]
    """Epsilon of each norm, by module."""


@torch.no_grad()
def reference_activations(
    config: RunConfig, data: TrainingData, *, step: int, context: ContextPlacement | None
) -> ReferencePass:
    """Run the step's forward in one process.

    The module gets the task's own batches, made here, since a reference may take samples apart: what the ranks' samples
    were is compared before, by content.

    Args:
        config: configuration returned by `as_proof`.
        data: training data.
        step: failing step, from 1; the steps before are trained first.
        context: placement of tokens on context-parallel ranks, if there are any.
    """
    f, train = run_facts(config), config.train
    model, samples_of = build_reference(config), config.family.reference(f, data)
    if step > 1:
        with torch.enable_grad():
            trained = compute_reference(config, data, num_steps=step - 1, samples_of=samples_of).parameters
        for name, value in trained.items():
            model.state_dict()[name].copy_(value)
    indices = list(range((step - 1) * train.global_batch, step * train.global_batch))
    count_over_batch(model, _AllSamples(config, data), indices)
    task, samples = config.family.task(f, data, torch.device("cpu")), cells(config, indices)
    found, tokens = [], {}
    for cell, inside in enumerate(samples):
        values: Values = {}
        repeated: set[str] = set()
        batch = task.batch(range(inside[0], inside[-1] + 1))
        with probed(model, partial(_take, values, repeated)):
            config.family.run(model, batch.inputs, batch)
        found.append({name: value for name, value in values.items() if name not in repeated})
        if context is not None:
            layout = next(one for one in batch.conditions if isinstance(one, TokenLayout))
            tokens[cell] = [shard_indices(shard) for shard in context.shards(layout.documents)]
    epsilons = {
        name: module.eps for name, module in model.named_modules() if isinstance(module, nn.RMSNorm) and module.eps
    }
    return ReferencePass(found, tuple(map(tuple, samples)), tokens, epsilons)


def _take(values: Values, repeated: set[str], name: str, value: Tensor) -> None:
    if name in values:
        repeated.add(name)
    values[name] = value.clone()


class _AllSamples(Reference):
    """Runs samples through a model as the task's batches do, for routers that count all tokens of a step."""

    def __init__(self, config: RunConfig, data: TrainingData) -> None:
        self._family, self._task = config.family, config.family.task(run_facts(config), data, torch.device("cpu"))

    def loss(self, model: torch.nn.Module, indices: list[int]) -> torch.Tensor:
        batch = self._task.batch(range(indices[0], indices[-1] + 1))
        return self._family.run(model, batch.inputs, batch)


@dataclass(frozen=True)
class Step:
    """The step in which the forward goes wrong."""

    number: int
    samples: tuple[tuple[int, ...], ...]
    """Samples of each cell."""
    stages: StagePlacement | None = None


def locate(forward: Forward, step: Step) -> Diagnosis | None:
    """Return the place and the kind of the first difference; None if there is none."""
    first = forward.first_difference()
    when = f"in step {step.number}"
    if first is None:
        return None
    scope = scope_words({value.rank for value in first.wrong}, {value.rank for value in first.compared}, forward.axes)
    symptom = f"the first value that differs is the {first.name}, {scope}"
    relation = _order(first, forward) or narrow_words(first, forward)
    relation = relation or explain(first.wrong, forward) or _unreduced(first)
    between = _between(first, step)
    cause = f"{relation}; {between}" if relation else between
    where = _where(first, step)
    error = max(value.error for value in first.wrong)
    detail = f"{when}: relative error {error:.1e}" + (f", {where}" if where else "")
    return Diagnosis(FaultKind.FORWARD, symptom, cause, detail)


def _order(first: FirstDifference, forward: Forward) -> str | None:
    """Name a module that a rank ran too early."""
    value = first.wrong[0]
    due = list(forward.reference[value.cell])
    later = set(due[due.index(first.name) + 1 :])
    ran = list(forward.ranks[value.rank][value.cell % forward.num_microbatches])
    early = next((name for name in ran[: ran.index(first.name)] if name in later), None)
    return None if early is None else f"{_module(early)} runs before {_module(first.name)}"


def _module(name: str) -> str:
    return name.partition(" of ")[2]


def _unreduced(first: FirstDifference) -> str | None:
    """Name the partial sum that was not reduced before this value was computed from it."""
    partial = first.partial_before
    return f"the sum over tp is missing: the {partial} is right only once it is summed" if partial else None


def _between(first: FirstDifference, step: Step) -> str:
    """Say which code computes the value, from what was compared before it."""
    what, module = first.name.partition(" ")[0], _module(first.name)
    if what == "output":
        if f"input of {module}" in first.right_before or f"queries of {module}" in first.right_before:
            return f"what {module} takes is right, so the fault is in it"
        return f"{module}, or what it takes"
    if what in ("queries", "keys", "values"):
        return f"the projection is right: look at what is done to {what} before attention"
    sender = _sending_stage(module, step.stages)
    if sender is not None:
        return f"what {_stage(sender + 1, step)} receives is not what {_stage(sender, step)} returns"
    if not first.right_before:
        return f"what {module} is given"
    last = first.right_before[-1]
    return f"the {last} is right: look at what is computed between them"


def _sending_stage(module: str, stages: StagePlacement | None) -> int | None:
    """Return the stage that sends a module its input; None if the module is not the first of a later stage."""
    if stages is None:
        return None
    for stage, layers in enumerate(stages.layers):
        if stage and layers and module.rpartition(".")[2] == str(layers[0]) and module.count(".") == 1:
            return stage - 1
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
