"""Compare the records of a run with the reference of each step: verdicts, tolerances and likely causes.

Each rank records what its dropouts did, so those that differ between tensor-parallel ranks that should agree are
found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from meshwright.comm.compression.catalogue import is_lossy
from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.models.contract.family import TrainingData
from meshwright.models.contract.task import Reference
from meshwright.plan.run_plan import RunPlan
from meshwright.prove.as_run.codec_errors import Growth, PlainCodec, compressed_units, relative_codec_errors
from meshwright.prove.as_run.configuration import has_feedback
from meshwright.prove.as_run.findings import gradient_findings, low_precision_sums, update_findings
from meshwright.prove.as_run.fit_in_noise import NoisyGradient
from meshwright.prove.as_run.record_run import AsRunRecord, DropoutCall
from meshwright.prove.as_run.result import AsRunResult, Check, Feedback, Finding
from meshwright.prove.as_run.rounded_reference import RoundedReference, StepReference
from meshwright.prove.as_run.update_check import update_errors
from meshwright.prove.compare.assemble_shards import assemble
from meshwright.prove.compare.result import Diagnosis, FaultKind
from meshwright.prove.compare.tensor_shards import AssembledTensor
from meshwright.prove.diagnose.contents import diagnose_contents
from meshwright.prove.diagnose.factors import LayoutCounts
from meshwright.prove.diagnose.phrases import rank_words
from meshwright.prove.diagnose.samples import diagnose_samples
from meshwright.prove.record.evidence import RecordedShard
from meshwright.prove.record.recording_task import sample_contents

ROUNDING_FACTOR = 3.0
"""Safety factor on the measured sensitivity to rounding: shards round partial sums that the plain module doesn't have,
and a few perturbations don't find the largest deviation."""
CODEC_FACTOR = 1.5
"""Safety factor on the error expected of a plain quantiser, whose groups differ from those of the layout."""
ROUNDED_INITIAL = 1e-6
"""Relative tolerance of initial weights, which are drawn in float64 and rounded to the dtype of the masters."""
LOSS_ROUNDINGS = 4
"""Rounding errors of a loss, relative to the dtype of the masters."""
SUM_ROUNDINGS = 256
"""Rounding errors of a norm, relative to its dtype."""


@dataclass
class _Steps:
    """What is known of all steps, per step."""

    references: list[StepReference] = field(default_factory=list)
    gradients: list[dict[str, AssembledTensor]] = field(default_factory=list)
    codec: list[dict[str, float]] = field(default_factory=list)
    """Relative errors expected of a plain quantiser."""

    def tolerance(self, name: str, step: int) -> float:
        """Return the tolerance of a gradient in a step.

        A step's few evaluations may happen to deviate little, so all steps together count as well.
        """
        measured = [reference.sensitivity.gradients[name] for reference in self.references]
        rounding = ROUNDING_FACTOR * max(measured[step - 1], float(np.sqrt(np.mean(np.square(measured)))))
        rounding += self.references[step - 1].sensitivity.choices.get(name, 0.0)
        return rounding + CODEC_FACTOR * self.codec[step - 1].get(name, 0.0)


def judge(config: RunConfig, plan: RunPlan, records: list[AsRunRecord], data: TrainingData) -> AsRunResult:
    """Compare the records of all ranks with the reference.

    Args:
        config: configuration returned by `as_configured`.
        plan: plan of the run.
        records: records of all ranks.
        data: training data.
    """
    axes, num_steps = config.mesh.axes(), len(records[0].steps)
    samples = config.family.reference(run_facts(config), data)
    reference = RoundedReference(config, plan, samples)
    counts = LayoutCounts(axes, config.train.num_microbatches, config.train.global_batch)
    findings = [*_samples(config, records, samples), *_initial(records, reference, counts)]
    result = AsRunResult(
        axes, config.train.num_microbatches, num_steps, config.train.precision, (), {}, Check(0, 0), Check(0, 0), {}
    )
    incomplete = [*_incomplete(records, reference, counts)]
    if incomplete:
        return replace(result, findings=(*findings, *incomplete))
    steps, feedback = _evaluate(config, plan, records, reference, counts)
    result = replace(
        result,
        gradients=_check_gradients(steps, counts),
        losses=_check_losses(records, steps),
        norms=_check_norms(records, steps),
        updates=_check_updates(config, records),
        feedback=feedback,
    )
    findings += diagnose_dropouts(records, plan)
    root = findings[0].diagnosis.symptom if findings else ""
    updates = update_findings(config, records, result.updates)
    findings += gradient_findings(
        result.gradients,
        lambda name, step: _noisy(steps, counts, name, step),
        root=root,
        wrong_updates=bool(updates),
        is_compiled=any(kind.compiled for kind in plan.kinds),
    )
    findings += updates
    right = {name: [found[name] for found in steps.gradients] for name, check in result.gradients.items() if check.ok}
    findings += low_precision_sums(config, plan, steps.references, right)
    findings += _scalars(result, root=root, has_cause=bool(findings))
    return replace(result, findings=tuple(findings), notes=tuple(_notes(config, plan, result, records)))


def _samples(config: RunConfig, records: list[AsRunRecord], reference: Reference) -> list[Finding]:
    """Compare the order of samples, and their contents but for floating-point parts, which the precision rounds."""
    axes, size, num_steps = config.mesh.axes(), config.train.global_batch, len(records[0].steps)
    batches = [list(range(at * size, (at + 1) * size)) for at in range(num_steps)]
    read = [[record.step(at + 1).samples for at in range(num_steps)] for record in records]
    found = list(diagnose_samples(read, batches, axes, config.train.num_microbatches))
    expected = sample_contents(reference, num_steps * size, with_floats=False)
    contents = [[record.step(at + 1).contents for at in range(num_steps)] for record in records]
    found += diagnose_contents(contents, expected, batches, axes)
    return [Finding("samples", diagnosis) for diagnosis in found]


def _full(records: list[AsRunRecord], name: str, at: int, shape: torch.Size, counts: LayoutCounts) -> AssembledTensor:
    held = [(rank, record.weights[at][name]) for rank, record in enumerate(records) if name in record.weights[at]]
    return assemble(name, [RecordedShard(r, tuple(o), value) for r, (o, value) in held], tuple(shape), counts.axes)


def _incomplete(records: list[AsRunRecord], reference: RoundedReference, counts: LayoutCounts) -> Iterator[Finding]:
    """Yield parameters that the ranks don't hold completely, without which no reference can be evaluated."""
    for name, value in reference.initial.items():
        full = _full(records, name, 0, value.shape, counts)
        if full.faults or (not full.shards and value.numel()):
            cause = "; ".join(full.faults) or "no rank holds a shard"
            yield Finding(name, Diagnosis(FaultKind.EVIDENCE, "the shards do not make up the tensor", cause))
    for rank, record in enumerate(records):
        bad = [step for step in range(1, len(record.steps) + 1) if record.step(step).skipped]
        if bad:
            diagnosis = Diagnosis(FaultKind.NON_FINITE, f"step {bad[0]} is not finite on rank {rank}", "it was skipped")
            yield Finding("steps", diagnosis)


def _initial(records: list[AsRunRecord], reference: RoundedReference, counts: LayoutCounts) -> Iterator[Finding]:
    wrong: dict[str, list[int]] = {}
    for name, value in reference.initial.items():
        full, expected = _full(records, name, 0, value.shape, counts), value.numpy()
        for shard in full.shards:
            if not np.allclose(shard.value, shard.slice_of(expected), rtol=ROUNDED_INITIAL, atol=0):
                wrong.setdefault(name, []).append(shard.rank)
    if wrong:
        ranks = rank_words(rank for found in wrong.values() for rank in found)
        diagnosis = Diagnosis(FaultKind.UNRECOGNISED, f"initial weights differ on {ranks}", "not those of the seed")
        yield Finding("initial weights", diagnosis, tuple(wrong))


def _evaluate(
    config: RunConfig, plan: RunPlan, records: list[AsRunRecord], reference: RoundedReference, counts: LayoutCounts
) -> tuple[_Steps, Feedback | None]:
    """Evaluate the reference of each step at the parameters that the layout held."""
    steps, size = _Steps(), config.train.global_batch
    units = compressed_units(plan)
    names = {name for unit in units for name in unit.names}
    codecs = [PlainCodec(config, plan, feedback) for feedback in (True, False)] if names else []
    growths = [Growth() for _ in range(3)]
    for step in range(1, len(records[0].steps) + 1):
        weights = {}
        for name, value in reference.initial.items():
            full = _full(records, name, step - 1, value.shape, counts)
            weights[name] = torch.from_numpy(next(full.replicas()).value) if full.shards else value
        found = reference.step(weights, list(range((step - 1) * size, step * size)))
        steps.references.append(found)
        steps.gradients.append(_gradients(records, step, found, counts))
        steps.codec.append({})
        if not names:
            continue
        exact = found.gradients()
        (with_feedback, squares), (without, _) = (codec.reduce(found.rounded) for codec in codecs)
        steps.codec[-1] = relative_codec_errors(squares, exact)
        complete = {name: gradient for name, gradient in steps.gradients[-1].items() if gradient.shards}
        observed = {name: torch.from_numpy(next(gradient.replicas()).value) for name, gradient in complete.items()}
        for growth, values in zip(growths, (observed, with_feedback, without), strict=True):
            growth.add(values, exact, names)
    if not has_feedback(plan):
        return steps, None
    return steps, Feedback(units[0].method.name, *(growth.value() for growth in growths))


def _gradients(
    records: list[AsRunRecord], step: int, reference: StepReference, counts: LayoutCounts
) -> dict[str, AssembledTensor]:
    found = {}
    for name, partial in reference.partial_gradients.items():
        shards = []
        for rank, record in enumerate(records):
            gradients, weights = record.step(step).gradients, record.weights[step - 1]
            if name in gradients:
                shards.append(RecordedShard(rank, tuple(gradients[name][0]), gradients[name][1]))
            elif name in weights and not weights[name][1].numel():
                shards.append(RecordedShard(rank, tuple(weights[name][0]), weights[name][1]))
        found[name] = assemble(name, shards, tuple(partial.shape[2:]), counts.axes)
    return found


def _noisy(steps: _Steps, counts: LayoutCounts, name: str, step: int) -> NoisyGradient:
    contributions = steps.references[step - 1].partial_gradients[name].numpy()
    return NoisyGradient(steps.gradients[step - 1][name], contributions, steps.tolerance(name, step), counts)


def _check_gradients(steps: _Steps, counts: LayoutCounts) -> dict[str, Check]:
    checks = {}
    for name in steps.references[0].partial_gradients:
        found = []
        for step in range(1, len(steps.references) + 1):
            gradient = _noisy(steps, counts, name, step)
            found.append(Check(gradient.error(), gradient.tolerance, step))
        # Of right gradients, show the step that proves most.
        wrong = [check for check in found if not check.ok]
        checks[name] = wrong[0] if wrong else min(found, key=lambda check: check.tolerance)
    return checks


def _worst(errors: list[list[float]], tolerance: float) -> Check:
    """Return the check of errors [step][rank]: the first wrong step or, if there is none, the one with the largest."""
    by_step = [max(error if error == error else float("inf") for error in of_ranks) for of_ranks in errors]
    wrong = [at for at, error in enumerate(by_step) if error > tolerance]
    shown = wrong[0] if wrong else max(range(len(by_step)), key=by_step.__getitem__)
    return Check(by_step[shown], tolerance, shown + 1)


def _check_losses(records: list[AsRunRecord], steps: _Steps) -> Check:
    errors = [
        [abs(record.step(at).loss / reference.loss - 1) for record in records]
        for at, reference in enumerate(steps.references, 1)
    ]
    # A loss is summed in the masters' dtype, whose rounding perturbations may not show.
    floor = LOSS_ROUNDINGS * torch.finfo(_masters(records)).eps
    return _worst(errors, floor + ROUNDING_FACTOR * max(one.sensitivity.loss for one in steps.references))


def _check_norms(records: list[AsRunRecord], steps: _Steps) -> Check:
    """Compare reported norms with the norms of the recorded gradients, averaged over replicas."""
    errors = []
    for at, gradients in enumerate(steps.gradients, 1):
        squares = [np.mean([np.square(replica.value).sum() for replica in g.replicas()]) for g in gradients.values()]
        norm = float(np.sqrt(np.sum(squares)))
        errors.append([abs(record.step(at).grad_norm / norm - 1) if norm else float("inf") for record in records])
    return _worst(errors, SUM_ROUNDINGS * torch.finfo(_masters(records)).eps)


def _masters(records: list[AsRunRecord]) -> torch.dtype:
    shards: Iterator[Tensor] = (value for record in records for _, value in record.weights[0].values())
    return next((value.dtype for value in shards if value.is_floating_point()), torch.float32)


def _check_updates(config: RunConfig, records: list[AsRunRecord]) -> dict[str, Check]:
    checks: dict[str, Check] = {}
    for record in records:
        for name in dict.fromkeys(name for one in record.steps for name in one["gradients"]):
            found = _worst([[error] for error in update_errors(record, name, config)], 1.0)
            if name not in checks or found.error > checks[name].error:
                checks[name] = found
    return checks


def _scalars(result: AsRunResult, *, root: str, has_cause: bool) -> Iterator[Finding]:
    if not result.losses.ok:
        check = result.losses
        symptom = f"relative error {check.error:.1e} in step {check.step}, rounding explains {check.tolerance:.1e}"
        follows = root or ("wrong weights" if has_cause and check.step > 1 else "")
        kind = FaultKind.CONSEQUENCE if follows else FaultKind.UNRECOGNISED
        cause = f"may follow: {follows}" if follows else "the forward differs from the reference"
        yield Finding("loss", Diagnosis(kind, symptom, cause))
    if not result.norms.ok:
        symptom = f"relative error {result.norms.error:.1e} in step {result.norms.step}"
        cause = "the norm is not that of the gradients: parameters or ranks are left out, or counted several times"
        yield Finding("norm", Diagnosis(FaultKind.NORM_MEMBERS, symptom, cause))
    feedback = result.feedback
    if feedback is not None and not feedback.ok:
        symptom = (
            f"over {result.num_steps} steps the errors grow to {feedback.observed:.1f} × that of one step: "
            f"{feedback.with_feedback:.1f} with error feedback, {feedback.without:.1f} without"
        )
        cause = "the error feedback is missing: each step's error is lost instead of entering the next step"
        yield Finding(f"comm.gradients={feedback.method}", Diagnosis(FaultKind.UNRECOGNISED, symptom, cause))


def _notes(config: RunConfig, plan: RunPlan, result: AsRunResult, records: list[AsRunRecord]) -> Iterator[str]:
    loose = [name for name, check in result.gradients.items() if not check.proves]
    comm = (config.comm.gradients, config.comm.weights)
    if loose:
        shown = ", ".join(loose[:2]) + (f" and {len(loose) - 2} more" if len(loose) > 2 else "")
        by = " and ".join([config.train.precision, *(name for name in comm if is_lossy(name))])
        yield f"not proved: the gradients of {shown}; rounding to {by} changes them like a fault"
    norms = [step["grad_norm"] for record in records for step in record.steps]
    if max(norms) <= config.train.max_grad_norm:
        yield f"not proved: clipping, as no norm exceeded train.max_grad_norm = {config.train.max_grad_norm:g}"
    if compressed_units(plan):
        yield "not proved: the dtype of reductions, as the codec rounds gradients"


def diagnose_dropouts(records: list[AsRunRecord], plan: RunPlan) -> Iterator[Finding]:
    """Yield the first dropout that tensor-parallel ranks don't compute as they should.

    Without sequence parallelism they hold the same stream, and the same inputs must give the same output. With it each
    holds other tokens, so no number of a token may appear on two ranks.
    """
    tp = plan.mesh.view("tp")
    if not tp:
        return
    lines = {plan.mesh.line(rank, tp) for rank in range(plan.mesh.num_ranks())}
    for first, *others in sorted(lines):
        for other in others:
            for a, b in zip(records[first].dropouts, records[other].dropouts, strict=False):
                found = _sharded(a, b, other) if plan.sequence_parallel else _replicated(a, b, first, other)
                if found is not None:
                    yield Finding(f"dropout at {a[0]}", found)
                    return


def _replicated(a: DropoutCall, b: DropoutCall, first: int, other: int) -> Diagnosis | None:
    if a[1] != b[1] or a[2] == b[2]:
        return None
    symptom = f"{rank_words((first, other))} along tp have the same inputs and different outputs"
    cause = f"rank {other} drops other elements than rank {first}: masks differ between tp ranks that should agree"
    return Diagnosis(FaultKind.REPLICAS_DIFFER, symptom, cause)


def _sharded(a: DropoutCall, b: DropoutCall, other: int) -> Diagnosis | None:
    twice = set(a[3]) & set(b[3])
    if not twice:
        return None
    symptom = f"rank {other} drops by the numbers of tokens of another tp rank, such as {min(twice)}"
    return Diagnosis(FaultKind.REPLICAS_DIFFER, symptom, "masks repeat: tokens are numbered by their place on the rank")
