"""Conclude a proof from the records of all ranks: record → judge → explain, what other steps would do, and then trace,
if a cause isn't known.

Other steps are those that ordinary ones don't show: later learning rates, an epoch's end, steps that are skipped. The
processes of a proof write to a folder that `api.prove` reads; tensors are loaded with `weights_only=True`.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from meshwright.config.facts_for_family import run_facts
from meshwright.config.resolve import learning_rate
from meshwright.config.schema import RunConfig, TrainConfig
from meshwright.data.sampler import SampleOrder, WindowOrder
from meshwright.features.registry import reference_features
from meshwright.models.contract.family import TrainingData
from meshwright.models.contract.task import ShowsSamples
from meshwright.plan.run_plan import RunPlan
from meshwright.prove.as_run.conclude import as_run_notes, further_findings, measure
from meshwright.prove.explain.explain import Explained, Explainer, ordered
from meshwright.prove.judge.judge import EXACT, Comparison, Expected, Sides, Tolerances, audit, audit_steps, compare
from meshwright.prove.judge.tensors import LayoutCounts
from meshwright.prove.placement import context_placement_of
from meshwright.prove.record.evidence import (
    Evidence,
    RankRecord,
    RecordingTask,
    other_contents,
    sample_contents,
    sample_digests,
)
from meshwright.prove.record.layout_run import gather_evidence, record_rank
from meshwright.prove.record.plain_optimizer import plain_learning_rate
from meshwright.prove.record.reference_run import CPU, PlainModel, chunk_contributions, token_contributions
from meshwright.prove.result import UNKNOWN, Diagnosis, FaultKind, Finding, ParameterResult, ProofResult, rank_words
from meshwright.prove.spec import ProofSpec, clip_limit
from meshwright.prove.trace.conclude import find_place, with_place
from meshwright.prove.trace.probe import RankTrace, trace_rank
from meshwright.train.build_job import choose_device, rank_group
from meshwright.train.launch.rank_context import RankContext
from meshwright.units import counted, first_words, join_words


def conclude(
    config: RunConfig,
    plan: RunPlan,
    records: list[RankRecord],
    data: TrainingData,
    *,
    num_steps: int,
    as_run: bool = False,
    plain: PlainModel | None = None,
    device: torch.device = CPU,
) -> ProofResult:
    """Compare the records of all ranks with the reference, and explain what differs.

    Args:
        config: configuration returned by `as_proof` or `as_configured`.
        plan: plan of the layout.
        records: records of all ranks.
        data: training data.
        num_steps: steps that were asked for.
        as_run: whether the run is proved as configured.
        plain: the reference's module, if it is made already.
        device: device that the reference computes on otherwise.
    """
    evidence, plain = gather_evidence(config, plan, records), plain or PlainModel(config, data, device)
    result = ProofResult(
        evidence.axes, evidence.num_microbatches, num_steps, config.train.precision, (), (), (), (), as_run=as_run
    )
    if incomplete := audit_steps(evidence, num_steps):
        return replace(result, findings=tuple(Finding("evidence", one) for one in incomplete))
    if as_run:
        plain.add_features(reference_features(plan, evidence))
    sides = sides_of(config, evidence, plain, as_run=as_run)
    measured, feedback = measure(config, plan, plain, sides) if as_run else (None, None)
    comparison = compare(sides, measured or Tolerances())
    contents = sample_contents(plain.samples, num_steps * config.train.global_batch, with_floats=not as_run)
    others = partial(other_contents, plain.samples, evidence.axes.num_ranks())
    placement = context_placement_of(plan)
    tokens = None if placement is None else partial(token_contributions, plain, data, placement)
    is_compiled = any(kind.compiled for kind in plan.kinds)
    size = next((vars(part)["tokens"] for kind in plan.kinds for part in kind.parts if part.feature == "head_loss"), 0)
    chunks = partial(chunk_contributions, plain, data, size) if size and placement is None else None
    num_chunks = -(-plan.batch.samples * plan.rank_tokens // size) if size else 0
    explained = Explainer(comparison, contents, tokens, others, chunks, num_chunks, is_compiled).explain()
    result = with_verdicts(result, comparison, explained)
    if measured is not None:
        further = further_findings(config, plan, plain, comparison, measured.rounded, feedback)
        result = replace(result, findings=ordered([*result.findings, *further]), feedback=feedback)
        notes = as_run_notes(config, plan, result)
    else:
        branches = diagnose_branches(config, data, evidence)
        if any(one.about == "samples" for one in result.findings):  # which also goes for those at an epoch's end
            branches = tuple(one for one in branches if one.kind is not FaultKind.SAMPLES)
        result = replace(result, findings=(*result.findings, *(Finding("other steps", one) for one in branches)))
        notes = iter(unproved(config, data, evidence))
    return replace(result, notes=(*notes, *rounding_notes(result)))


def sides_of(config: RunConfig, evidence: Evidence, plain: Expected, *, as_run: bool) -> Sides:
    """Return both sides of a proof."""
    norms, limits = [step["grad_norm"] for step in evidence.ranks[0].steps], []
    for step in range(1, len(norms) + 1):
        limit = config.train.max_grad_norm
        if not as_run:
            limit = clip_limit(config, norms[: step - 1], step=step, num_steps=len(norms))
        limits.append(limit if limit > 0 else config.train.max_grad_norm)
    counts = LayoutCounts(evidence.axes, evidence.num_microbatches, config.train.global_batch)
    return Sides(evidence, plain, config.train, tuple(limits), counts)


def with_verdicts(result: ProofResult, comparison: Comparison, explained: Explained) -> ProofResult:
    """Return the result with the verdicts on all values, and the findings."""
    tensors = explained.tensors
    parameters = tuple(
        ParameterResult(
            name, tuple(value.shape), tensors["initial"][name], tensors["gradient"].get(name), tensors["update"][name]
        )
        for name, value in comparison.sides.expected.initial.items()
    )
    evidence = [Finding("evidence", one) for one in audit(comparison.sides)]
    findings = ordered([*evidence, *explained.findings])
    found = replace(result, losses=explained.losses, norms=explained.norms, parameters=parameters, findings=findings)
    return replace(found, locate_step=step_to_locate(found))


def step_to_locate(result: ProofResult) -> int | None:
    """Return the step in which values of the forward or backward are wrong for an unknown reason, if it comes first."""
    if result.as_run and result.precision == "bfloat16":
        return None  # rounding changes single values as much as faults
    findings = [one for one in result.findings if not one.is_consequence]
    unknown = [one for one in findings if one.about in ("loss", "gradient") and one.diagnosis.kind in UNKNOWN]
    if not unknown:
        return None
    step = min(one.step for one in unknown)
    before = (one for one in findings if one.step < step or one.about in ("evidence", "samples", "initial", "forward"))
    return None if any(one.step <= step for one in before) else step


def rounding_notes(result: ProofResult) -> Iterator[str]:
    """Yield notes on replicas that are equal only within rounding, and on gradients that rounding changes most."""
    tensors = [tensor for parameter in result.parameters for tensor in parameter.tensors().values()]
    rounded = [tensor for tensor in tensors if tensor.ok and not tensor.replicas_equal]
    if rounded and not result.as_run:
        most = max(tensor.max_replica_difference for tensor in rounded)
        equal = counted(len(rounded), "tensor")
        yield f"replicas of {equal} are equal only within rounding (differ by up to {most:.1e})"
    cancelling = {
        one.name: one.gradient.error.relative
        for one in result.parameters
        if not result.as_run and one.gradient and one.gradient.ok and one.gradient.error.relative > EXACT
    }
    if cancelling:
        yield (
            f"the gradients of {first_words(list(cancelling), 2)} are sums that cancel: their errors, up to "
            f"{max(cancelling.values()):.1e}, are within what a rounding error of every parameter changes"
        )


def record_layout(context: RankContext, spec: ProofSpec) -> None:
    """Train as one rank of the layout under proof and save its record in the spec's folder."""
    config, plan = spec.config, spec.plan
    with rank_group(config, plan, context, choose_device(config, context)):
        data = config.family.open_data(run_facts(config))
        record = record_rank(config, context, data, num_steps=spec.num_steps, plan=plan, as_run=spec.as_run)
        torch.save(vars(record), spec.record(context.rank))


def compare_with_reference(context: RankContext, spec: ProofSpec) -> None:
    """Compute the reference on the device of the ranks, compare their records with it, and save the result in the same
    folder."""
    context.post("comparing")
    config, device = spec.config, choose_device(spec.config, context)
    data, records = config.family.open_data(run_facts(config)), load_records(spec)
    result = conclude(config, spec.plan, records, data, num_steps=spec.num_steps, as_run=spec.as_run, device=device)
    save(spec, result, loss_unit=records[0].loss_unit)


def load_records(spec: ProofSpec) -> list[RankRecord]:
    """Load the records of all ranks."""
    num_ranks = spec.config.mesh.axes().num_ranks()
    return [RankRecord(**torch.load(spec.record(rank), weights_only=True)) for rank in range(num_ranks)]


def save(spec: ProofSpec, result: ProofResult, *, loss_unit: str) -> None:
    """Save a result for `api.prove`; a second pass completes it."""
    spec.result.write_bytes(pickle.dumps((result, loss_unit)))


def trace_on_ranks(context: RankContext, spec: ProofSpec) -> None:
    """Train as one rank again, up to the step in which values go wrong, and save its activations."""
    config, plan = spec.config, spec.plan
    with rank_group(config, plan, context, choose_device(config, context)):
        data = config.family.open_data(run_facts(config))
        found = trace_rank(config, context, data, step=spec.step_to_locate(), plan=plan)
        torch.save(vars(found), spec.activations(context.rank))


def trace_with_reference(context: RankContext, spec: ProofSpec) -> None:
    """Compare the ranks' activations with the reference on the CPU, and add the place of the fault to the saved
    result."""
    context.post("comparing")
    config, num_ranks = spec.config, spec.config.mesh.axes().num_ranks()
    ranks = [RankTrace(**torch.load(spec.activations(rank), weights_only=True)) for rank in range(num_ranks)]
    data = config.family.open_data(run_facts(config))
    plain = PlainModel(config, data)
    sides = sides_of(config, gather_evidence(config, spec.plan, load_records(spec)), plain, as_run=spec.as_run)
    place = find_place(config, spec.plan, ranks, data, plain, sides, step=spec.step_to_locate())
    result, loss_unit = spec.load_result()
    save(spec, with_place(result, place, spec.plan), loss_unit=loss_unit)


RATE_TOLERANCE = 1e-12
MOST_RATES = 10_000
"""Learning rates that are compared, evenly spread over the run."""
MOST_WINDOWS = 1 << 18
"""Largest number of windows of which two epochs are gone through."""
MAX_NAMES = 3


def diagnose_branches(config: RunConfig, data: TrainingData, evidence: Evidence) -> tuple[Diagnosis, ...]:
    """Return what is wrong in branches that the steps of the proof don't take."""
    return (*_rates(config.train), *_skipped_steps(evidence), *_epoch_end(config, data))


def unproved(config: RunConfig, data: TrainingData, evidence: Evidence) -> Iterator[str]:
    """Yield a note for each branch that the proof neither took nor checked."""
    norms, limit = [step["grad_norm"] for step in evidence.ranks[0].steps], config.train.max_grad_norm
    if len(norms) == 1 and norms[0] <= limit:
        yield f"not proved: clipping, as the norm is below train.max_grad_norm = {limit:g}; --steps 2 proves it"
    source = config.family.reference(run_facts(config), data)
    if not isinstance(source, ShowsSamples):
        yield "not proved: what is in the samples, as the family's reference doesn't show them (ShowsSamples)"
    elif (largest := max(part.num_windows for part in source.order.parts)) > MOST_WINDOWS:
        yield f"not proved: that an epoch visits each of {largest:,} windows once"


def _rates(train: TrainConfig) -> Iterator[Diagnosis]:
    """Compare the learning rates of the whole run with the closed form."""
    numbers = np.unique(np.linspace(1, train.steps, min(train.steps, MOST_RATES)).round().astype(int))
    for step in (int(number) for number in numbers):
        rate, due = learning_rate(step, train), plain_learning_rate(step, train)
        if abs(rate - due) > RATE_TOLERANCE * max(abs(rate), abs(due)):
            shape = f"train.lr_schedule = {train.lr_schedule}, {train.warmup_steps} warm-up of {train.steps} steps"
            yield Diagnosis(
                FaultKind.LEARNING_RATE,
                f"the schedule has the learning rate {rate:.6g} in step {step}, expected {due:.6g}",
                f"the learning rate differs from its closed form ({shape})",
            )
            return


def _skipped_steps(evidence: Evidence) -> Iterator[Diagnosis]:
    """Check that no rank changed anything in a step with a value that isn't finite."""
    nonfinite, told = [record.nonfinite for record in evidence.ranks], list[dict[int, list[str]]]()
    for what, where in (("loss", 0), ("gradient", len(nonfinite) - 1)):
        if what not in nonfinite[where]:
            continue
        changed = {rank: found[what] for rank, found in enumerate(nonfinite) if found.get(what)}
        if changed:
            names = next(iter(changed.values()))
            every = {name for found in changed.values() for name in found}
            cause = _what_changes(every, on_all=len(changed) == len(nonfinite))
            yield Diagnosis(
                FaultKind.NON_FINITE if changed not in told else FaultKind.CONSEQUENCE,
                f"a step whose {what} is not finite on rank {where} changes {rank_words(changed)}",
                f"the step must be skipped by every rank: {cause}",
                f"rank {min(changed)} changed {first_words(names, MAX_NAMES)}",
            )
            told.append(changed)


def _what_changes(names: set[str], *, on_all: bool) -> str:
    """Return what a step changes that must be skipped."""
    left = {name for name in names if name.startswith("gradient of ")}
    counts = {name for name in names if name.startswith("step of ")}
    buffers = {name for name in names if name.startswith("buffer ")}
    moments = {name for name in names - left - counts if " of " in name}
    if not on_all:
        return "they must agree on whether loss and norm are finite"
    if moments:
        return "the optimizer takes it"
    parts = ["parameters change, but no moment of the optimizer"] * bool(names - left - counts - buffers)
    parts += ["its samples enter buffers, such as counts of experts' tokens"] * bool(buffers)
    parts += ["the optimizer counts it as a step, which changes later bias corrections"] * bool(counts)
    parts += ["its gradients are not cleared, so that later steps add to them"] * bool(left)
    return join_words(parts)


def _epoch_end(config: RunConfig, data: TrainingData) -> Iterator[Diagnosis]:
    """Read the samples around the end of the first epoch, and check that epochs visit each window once."""
    f = run_facts(config)
    reference = config.family.reference(f, data)
    if not isinstance(reference, ShowsSamples):
        return
    order = reference.order
    for part in order.parts:
        yield from _epochs(part)
    yield from _first_epoch(order)
    task = RecordingTask(config.family.task(f, data, CPU), config.family.conditions)
    around = range(order.first_repeat - 1, order.first_repeat + 1)
    batch = task.batch(around)
    _ = batch.inputs, batch.targets, batch.conditions
    for sample in around:
        due, found = sample_digests(reference.sample(sample)), task.contents[sample]
        wrong = [part for part in due if part in found and found[part] != due[part]]
        if wrong:
            which = "last sample of the first epoch" if sample < order.first_repeat else "first sample of the second"
            cause = "samples at the end of an epoch are read wrongly"
            yield Diagnosis(FaultKind.SAMPLES, f"the {join_words(wrong)} of the {which} ({sample}) differ", cause)


def _first_epoch(order: SampleOrder) -> Iterator[Diagnosis]:
    """Check that no window of several sources is read twice before one of them runs out."""
    if len(order.parts) == 1:
        return  # as its epochs show
    num_samples = min(order.first_repeat, MOST_WINDOWS)
    num_repeated = num_samples - len(np.unique(order.windows(range(num_samples))))
    if num_repeated:
        symptom = f"{num_repeated} of the first {num_samples} samples repeat a window"
        yield Diagnosis(FaultKind.SAMPLES, symptom, "the mixture's order gives a position of a source to two samples")


def _epochs(order: WindowOrder) -> Iterator[Diagnosis]:
    size = order.num_windows
    if size > MOST_WINDOWS:
        return
    epochs = order.windows(np.arange(2 * size)).reshape(2, size)
    for number, windows in enumerate(epochs, start=1):
        if not np.array_equal(np.sort(windows), np.arange(size)):
            missing = size - len(np.unique(windows))
            symptom = f"epoch {number} leaves out {missing} of {size} windows"
            yield Diagnosis(FaultKind.SAMPLES, symptom, "the sampler's order is not a permutation of the windows")
            return
