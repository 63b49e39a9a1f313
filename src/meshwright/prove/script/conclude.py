"""Compare a script's layout with its reference, in the order a fault propagates, and diagnose each difference.

Settings and samples come first, then initial weights, gradients, norm and loss of step 1, its update, and later steps.
The diagnoses are those of `meshwright prove`, except that the reference is a run of the script itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from meshwright.prove.explain.explain import group_by_cause, missing_gradient, narrow_to_axis
from meshwright.prove.explain.gradient_norm import diagnose_norm, suspect_norm
from meshwright.prove.explain.gradients import (
    GradientContext,
    diagnose_gradient,
    incomplete,
    misplaced,
    non_finite,
    replicas_differ,
    unrecognised,
    wrong_initial,
)
from meshwright.prove.explain.scalars import diagnose_loss
from meshwright.prove.explain.updates import proportional, still
from meshwright.prove.judge.counts import LayoutCounts, close, factor_cause
from meshwright.prove.judge.tensors import Array
from meshwright.prove.judge.verdicts import SuspectTensor, TensorVerdict, Verdicts, compare_tensors
from meshwright.prove.record.evidence import RecordedShard, Shards
from meshwright.prove.report import finding_lines, title
from meshwright.prove.result import (
    EVERYWHERE,
    Diagnosis,
    FaultKind,
    Finding,
    StepValue,
    TensorResult,
    rank_words,
    scope_words,
)
from meshwright.prove.script.evidence import (
    ScriptEvidence,
    ScriptTolerances,
    compare_reported,
    load_evidence,
    measure_tolerances,
    noisy_elements,
)
from meshwright.prove.script.gradient_causes import (
    clipped_between,
    copies_not_summed,
    drawn_alike,
    other_forward,
    other_parameters,
    overwritten,
    stepped_between,
    unequal_counts,
)
from meshwright.prove.script.layout_choice import ScriptRun
from meshwright.prove.script.samples import (
    diagnose_batches,
    diagnose_epochs,
    diagnose_optimizer,
    diagnose_settings,
    notes_on_settings,
    untied,
)
from meshwright.units import counted

ABOUT = {"initial": "initial", "gradients": "gradient", "after_first": "after_first_step", "parameters": "after_steps"}
"""Name of each kind of tensor in reports."""
SAME_FACTOR = 1e-3
"""Relative difference of clipping factors that are the same, if rounding is not coarser."""
COARSE = 0.05
"""Largest rounding with which factors are told apart."""


@dataclass
class LayoutResult:
    """Verdict on one layout: findings, and how far its tensors deviate."""

    layout: ScriptEvidence
    findings: list[Finding] = field(default_factory=list)
    deviations: dict[str, dict[str, TensorResult]] = field(default_factory=dict)
    """[kind][name]"""
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.findings

    def causes(self) -> list[Finding]:
        """Return the findings that follow from no other, or all if there are no such."""
        return [one for one in self.findings if not one.is_consequence] or self.findings


class _Comparison:
    """One layout against the reference; `fault` describes the first fault that makes later values wrong."""

    def __init__(self, layout: ScriptEvidence, reference: ScriptEvidence, tolerances: ScriptTolerances) -> None:
        self.layout, self.reference, self.tolerances = layout, reference, tolerances
        self.fault, self.wrong_gradients, self.loss_fault = "", set[str](), ""
        self.result = LayoutResult(layout)
        num_samples = sum(len(record.samples[0]) for record in reference.records)
        self._counts = LayoutCounts(layout.mesh.axes, layout.microbatches, num_samples)

    def counts(self, kind: str) -> LayoutCounts:
        """Return the sizes of the layout, with the rounding of one kind of tensor."""
        return replace(self._counts, rounding=min(self.tolerances.usual(kind), COARSE))

    def add(self, findings: list[Finding], fault: str) -> None:
        """Add findings; those after them may follow from `fault`."""
        self.result.findings += findings
        if findings and not self.fault:
            self.fault = fault

    def verdicts(self, kind: str, shards: Shards, expected: dict[str, Array]) -> Verdicts:
        """Compare all tensors of one kind."""
        known = {name: self.tolerances.tensors[kind].get(name, self.tolerances.usual(kind)) for name in expected}
        found = compare_tensors(shards, expected, self.counts(kind), known)
        self.result.deviations[kind] = {name: verdict.result for name, verdict in found.items()}
        return found


def compare_script(layout: ScriptEvidence, reference: ScriptEvidence, tolerances: ScriptTolerances) -> LayoutResult:
    """Compare a layout with the reference."""
    run = _Comparison(layout, reference, tolerances)
    names = list(other_parameters(run.layout, run.reference))
    run.add(names, "other parameters")
    settings = list(diagnose_settings(layout, reference))
    # A fault of the sampler that the reference has too is reported once, for the script.
    samples = diagnose_batches(layout, reference) or (None if diagnose_epochs(reference) else diagnose_epochs(layout))
    initial = _initial(run)
    run.add(settings, f"the finding on {settings[0].about}" if settings else "")
    run.add([] if samples is None else [Finding("samples", samples)], "wrong samples")
    run.add(initial, "initial weights that differ")
    before = "wrong samples" if samples is not None else "initial weights that differ" if initial else ""
    before = before or ("other parameters" if names else "")
    run.add(_gradients(run, before), "wrong gradients")
    norm = list(_norm(run, before))
    run.add(norm, "a wrong gradient norm")
    run.add(list(_first_loss(run, before)), "a wrong loss")
    run.add([] if norm else list(_scaled(run)), "gradients that are scaled before the step")
    first = _updates(run, "after_first", {})
    run.add(first, "a wrong update in step 1")
    wrong = {name for one in first for name in one.members}
    last = _updates(run, "parameters", dict.fromkeys(wrong, "its wrong update in step 1"))
    if last and not run.fault and (uncleared := list(_uncleared(run))):
        run.add(uncleared, "gradients that are not cleared")
        last = _updates(run, "parameters", {})
    run.add(last, "a wrong update")
    run.add(list(_later_series(run)), "")
    if layout.mesh.note:
        run.result.notes.append(layout.mesh.note)
    return run.result


def _initial(run: _Comparison) -> list[Finding]:
    expected = _expected(run, "initial")
    verdicts = run.verdicts("initial", run.layout.shards("initial"), expected)
    named = _diagnosed(verdicts, lambda one: wrong_initial(one.suspect, expected))
    return _grouped("initial", drawn_alike(run.layout, named))


def _gradients(run: _Comparison, before: str) -> list[Finding]:
    expected, parameters = _expected(run, "gradients"), run.layout.shards("parameters")
    recorded = run.layout.shards("gradients")
    shards = {name: _with_empty(recorded.get(name, []), parameters.get(name, [])) for name in expected}
    counts = run.counts("gradients")
    follows = before if "samples" in before or "initial" in before else ""
    context = GradientContext(expected, follows=follows)
    separate = set(untied(run.layout, run.reference))
    verdicts = run.verdicts("gradients", shards, expected)

    def cause(one: TensorVerdict) -> Diagnosis:
        name = one.suspect.assembly.name
        if name in separate:
            follows = "follows from the finding on tied weights"
            return Diagnosis(FaultKind.CONSEQUENCE, f"wrong {one.suspect.scope_text()}", follows)
        absent = missing_gradient(recorded.get(name, []), parameters.get(name, []), counts)
        if absent is not None and not all(record.trainable.get(name, True) for record in run.layout.records):
            return Diagnosis(FaultKind.CONSEQUENCE, absent.symptom, "follows from the finding on frozen")
        return absent or diagnose_gradient(one.suspect, context)

    found = narrow_to_axis(_diagnosed(verdicts, cause), counts)
    run.wrong_gradients = {name for name, verdict in found.items() if not verdict.result.ok}
    if run.wrong_gradients:
        found = _unknown_as(_follows_from(before), found) if before else _by_other_evidence(run, found)
    return _grouped("gradients", found)


def _with_empty(gradient: list[RecordedShard], parameter: list[RecordedShard]) -> list[RecordedShard]:
    """Add empty gradient shards for empty parameter shards, whose gradient may be None."""
    have = {shard.rank for shard in gradient}
    return gradient + [shard for shard in parameter if shard.rank not in have and not shard.value.numel()]


def _by_other_evidence(run: _Comparison, verdicts: Verdicts) -> Verdicts:
    """Explain wrong gradients by what was recorded between micro-batches and by the loss of step 1."""
    layout, reference = run.layout, run.reference
    if (stepped := stepped_between(layout, reference)) is not None:
        run.loss_fault = "an optimizer that steps in each micro-batch"
        return {name: one if one.result.ok else one.with_diagnosis(stepped) for name, one in verdicts.items()}
    found = _divided_twice(run, overwritten(layout, copies_not_summed(reference, verdicts)))
    if (clipped := clipped_between(layout, reference)) is not None:
        return _unknown_as(clipped, found)
    loss = _loss_verdict(run, "")
    if loss is None or loss.kind is not FaultKind.UNRECOGNISED:
        return found
    step = compare_reported(layout, reference, "losses", run.tolerances.losses)[0]
    if (unequal := unequal_counts(layout, reference, step.tolerance)) is not None:
        run.loss_fault = "means over unequal numbers of targets"
        return _unknown_as(unequal, found)
    explained = other_forward(layout, found, f"loss of step 1: {loss.symptom}")
    if explained != found:
        run.loss_fault = "another forward pass"
    return explained


def _unknown_as(diagnosis: Diagnosis, verdicts: Verdicts) -> Verdicts:
    """Give a diagnosis to wrong tensors that have no better one."""
    found = dict(verdicts)
    for name, one in verdicts.items():
        if one.result.diagnosis is not None and one.result.diagnosis.kind is FaultKind.UNRECOGNISED:
            found[name] = one.with_diagnosis(diagnosis)
    return found


def _follows_from(fault: str) -> Diagnosis:
    return Diagnosis(FaultKind.CONSEQUENCE, "wrong gradient", f"follows from {fault}")


def _divided_twice(run: _Comparison, verdicts: Verdicts) -> Verdicts:
    """Say how gradients come to be averaged over micro-batches once too often."""
    micro, found = run.layout.microbatches, dict(verdicts)
    for name, one in verdicts.items():
        old = one.result.diagnosis
        if old is None or old.factor is None or micro < 2 or not old.cause.startswith("averaged over "):
            continue
        if f"over the {micro} micro-batches" in old.cause:
            cause = (
                f"{old.cause}: such as a loss that the script divides, and accelerate or the pipeline's schedule too"
            )
            found[name] = one.with_diagnosis(replace(old, cause=cause))
    return found


def _norm(run: _Comparison, before: str) -> Iterator[Finding]:
    if not any(record.norms[0] for record in run.reference.records):
        return
    norm = compare_reported(run.layout, run.reference, "norms", run.tolerances.norms)[0]
    if norm.ok:
        return
    if fault := before or ("wrong gradients" if run.wrong_gradients else ""):
        yield Finding("norm", Diagnosis(FaultKind.CONSEQUENCE, "wrong in step 1", f"follows from {fault}"))
        return
    expected = _expected(run, "gradients")
    twice = {name for record in run.reference.records for group in record.tied for name in group[1:]}
    verdicts = run.verdicts("gradients", run.layout.shards("gradients"), expected)
    assemblies = {name: one.suspect.assembly for name, one in verdicts.items() if name not in twice}
    counts = replace(run.counts("gradients"), rounding=max(run.tolerances.norms[0], run.counts("gradients").rounding))
    yield Finding("norm", diagnose_norm(suspect_norm(norm, assemblies, counts)), step=1)


def _loss_verdict(run: _Comparison, before: str) -> Diagnosis | None:
    """Return the diagnosis of a wrong loss of step 1."""
    step = compare_reported(run.layout, run.reference, "losses", run.tolerances.losses)[0]
    if step.ok:
        return None
    counts = replace(run.counts("gradients"), rounding=step.tolerance)
    found = diagnose_loss(step, None, counts, root_fault=before)
    if found.kind is not FaultKind.UNRECOGNISED or run.wrong_gradients:
        return found
    # Right gradients are those of a right forward pass.
    unequal = unequal_counts(run.layout, run.reference, step.tolerance)
    cause = "only what is reported is wrong, since the gradients are right: it is not the mean over the global batch"
    return unequal or replace(found, cause=cause)


def _first_loss(run: _Comparison, before: str) -> Iterator[Finding]:
    found = _loss_verdict(run, before or run.loss_fault)
    if found is not None:
        yield Finding("loss", found)


def _uncleared(run: _Comparison) -> Iterator[Finding]:
    """Recognise gradients that are still there when step 2 begins, though not in the reference."""
    if any(record.uncleared for record in run.reference.records):
        return
    ranks = [rank for rank, record in enumerate(run.layout.records) if record.uncleared]
    if ranks:
        names = tuple(dict.fromkeys(name for rank in ranks for name in run.layout.records[rank].uncleared))
        symptom = f"gradients of step 1 are still there when step 2 begins, on {rank_words(ranks)}"
        cause = "gradients are not cleared after the step, so later ones are added to them: zero_grad is missing there"
        diagnosis = Diagnosis(FaultKind.CONTRIBUTIONS, symptom, cause)
        yield Finding("gradient", diagnosis, names, len(run.layout.shapes))


def _scaled(run: _Comparison) -> Iterator[Finding]:
    due = [value for record in run.reference.records for value in record.scaled]
    found = {rank: record.scaled[0] for rank, record in enumerate(run.layout.records) if record.scaled}
    if not due or not found or run.wrong_gradients:
        return
    same = max(SAME_FACTOR, run.counts("gradients").rounding)
    wrong = {rank: value for rank, value in found.items() if abs(value - due[0]) > same * abs(due[0])}
    if not wrong:
        return
    low, high = min(found, key=lambda rank: found[rank]), max(found, key=lambda rank: found[rank])
    expected = f"{due[0]:.4g} in the reference, between recorder.gradients() and the optimizer's step"
    idle = [rank for rank, value in found.items() if abs(value - 1.0) <= same]
    if idle and len(idle) < len(found) and set(idle) == set(wrong):
        symptom, cause = f"not clipped on {rank_words(idle)}, scaled by {expected}", "every rank has to clip"
    elif idle and len(idle) == len(found):
        symptom, cause = f"not scaled, by {expected}", "gradients are not clipped"
    elif found[high] - found[low] > same * found[high]:
        symptom = f"scaled by {found[low]:.4g} on rank {low} and {found[high]:.4g} on rank {high}, by {expected}"
        cause = "gradients are clipped by a norm of each rank's own shards: reduce the norm over all ranks"
    else:
        factor = factor_cause(found[low] / due[0], run.counts("gradients")) if abs(due[0] - 1.0) <= same else ""
        symptom, cause = f"scaled by {found[low]:.4g}, by {expected}", factor or "clipping with another norm or limit"
    yield Finding("clipping", Diagnosis(FaultKind.NORM_MEMBERS, symptom, cause))


def _updates(run: _Comparison, kind: str, own_faults: dict[str, str]) -> list[Finding]:
    expected, initial = _expected(run, kind), _expected(run, "initial")
    shards, num_skipped = _without_noise(run, run.layout.shards(kind), expected)
    if num_skipped:
        note = (
            f"{num_skipped} of {sum(value.size for value in expected.values())} elements have a gradient of rounding "
        )
        note += "size in step 1, which may move them either way: their weights are not compared"
        run.result.notes += [] if note in run.result.notes else [note]
    verdicts = run.verdicts(kind, shards, expected)

    def cause(one: TensorVerdict) -> Diagnosis:
        name = one.suspect.assembly.name
        own = "its wrong gradient" if name in run.wrong_gradients else own_faults.get(name, "")
        if own or run.fault:
            symptom = f"wrong {one.suspect.scope_text()}"
            return Diagnosis(FaultKind.CONSEQUENCE, symptom, f"follows from {own or run.fault}")
        return _without_step(run, one, _update_cause(one.suspect, expected, initial.get(name)))

    return _grouped(kind, _diagnosed(verdicts, cause))


def _update_cause(suspect: SuspectTensor, expected: dict[str, Array], initial: Array | None) -> Diagnosis:
    """Return the likely cause of a parameter that is wrong after a step."""
    found = incomplete(suspect) or non_finite(suspect)
    if found is None and initial is not None and (ranks := still(suspect, initial)):
        scope = scope_words(ranks, suspect.informative_ranks, suspect.counts.axes)
        cause = "the parameter is not in the optimizer, or its gradient was cleared before the step"
        if scope != EVERYWHERE:
            cause = f"the optimizer skipped {rank_words(ranks)}'s shard"
        found = Diagnosis(FaultKind.NOT_UPDATED, f"never updated, still at its initial value {scope}", cause)
    found = found or misplaced(suspect, expected)
    if found is None and initial is not None:
        found = proportional(suspect, initial)
    if found is not None or (found := replicas_differ(suspect)) is not None:
        return found
    base = unrecognised(suspect)
    right = "the gradients and the norm of step 1 are correct: check the optimizer step, clipping and later gradients"
    return replace(base, cause=f"{base.cause}; {right}")


def _without_step(run: _Comparison, one: TensorVerdict, found: Diagnosis) -> Diagnosis:
    """Tell ranks whose optimizer takes no step from single parameters that it leaves out."""
    ranks = one.suspect.wrong_ranks
    records = [run.layout.records[rank] for rank in ranks]
    still = all(
        torch.equal(value, record.initial[name][1])
        for record in records
        for name, (_, value) in record.after_first.items()
    )
    if found.kind is not FaultKind.NOT_UPDATED or not still or not all(any(r.optimized.values()) for r in records):
        return found
    symptom = f"no parameter is updated in step 1 on {rank_words(ranks)}"
    cause = f"the optimizer takes no step on {rank_words(ranks)}"
    if not all(record.scaled for record in records):
        cause += ", or gradients were cleared before it"
    return Diagnosis(FaultKind.NOT_UPDATED, symptom, cause)


def _without_noise(run: _Comparison, shards: Shards, expected: dict[str, Array]) -> tuple[Shards, int]:
    """Replace elements whose update is decided by rounding with the expected ones; return how many they are."""
    masks, total = noisy_elements(run.reference, run.tolerances.tensors["gradients"]), 0
    replaced = dict(shards)
    for name, mask in masks.items():
        if name not in expected or not mask.any() or mask.shape != expected[name].shape:
            continue
        total += int(mask.sum())
        replaced[name] = []
        for shard in shards.get(name, []):
            value = shard.value.double().clone()
            at = tuple(slice(a, a + n) for a, n in zip(shard.offset, value.shape, strict=True))
            if mask[at].shape == tuple(value.shape):
                chosen = torch.from_numpy(mask[at])
                value = torch.where(chosen, torch.from_numpy(expected[name][at]), value)
            replaced[name].append(RecordedShard(shard.rank, shard.offset, value))
    return replaced, total


def _later_series(run: _Comparison) -> Iterator[Finding]:
    for name, about, limits in (("losses", "loss", run.tolerances.losses), ("norms", "norm", run.tolerances.norms)):
        if not any(record.norms[0] for record in run.reference.records) and name == "norms":
            continue
        steps = compare_reported(run.layout, run.reference, name, limits)
        wrong = next((step for step in steps if not step.ok), None)
        if wrong is not None and wrong.step > 1:
            yield Finding(about, _later_step(steps, wrong, about, follows=bool(run.fault)), step=wrong.step)


def _later_step(steps: tuple[StepValue, ...], wrong: StepValue, name: str, *, follows: bool) -> Diagnosis:
    """Diagnose the first wrong loss or norm, which is not that of step 1."""
    bad = [rank for rank, value in enumerate(wrong.observed) if not math.isfinite(value)]
    if bad:
        symptom = f"{name} not finite in step {wrong.step} on {rank_words(bad)}"
        return Diagnosis(FaultKind.NON_FINITE, symptom, "NaN or infinity entered the computation")
    for offset, word in ((-1, "behind"), (1, "ahead")):
        at = wrong.step - 1 + offset
        if at < len(steps) and all(close(value, steps[at].expected, wrong.tolerance) for value in wrong.observed):
            symptom = f"{name} of step {wrong.step} matches step {at + 1} of the reference"
            return Diagnosis(FaultKind.OTHER_STEP, symptom, f"one step {word}")
    symptom = f"{name} correct in step 1, wrong from step {wrong.step} on"
    if follows:
        return Diagnosis(FaultKind.CONSEQUENCE, symptom, "follows from a wrong update: see the parameters")
    found = wrong.observed[wrong.rank]
    detail = (
        f"relative error {wrong.relative_error:.1e} on rank {wrong.rank}: {found:.9g}, expected {wrong.expected:.9g}"
    )
    return Diagnosis(FaultKind.UNRECOGNISED, symptom, "not recognised", detail)


def _expected(run: _Comparison, kind: str) -> dict[str, Array]:
    """Return the reference's tensors of one kind, but for parameters that the layout lacks or shapes otherwise."""
    shapes = run.layout.shapes
    return {name: full for name, full in run.reference.fulls(kind).items() if shapes.get(name) == full.shape}


def _diagnosed(verdicts: Verdicts, diagnose: Callable[[TensorVerdict], Diagnosis]) -> Verdicts:
    return {name: one if one.result.ok else one.with_diagnosis(diagnose(one)) for name, one in verdicts.items()}


def _grouped(kind: str, verdicts: Verdicts) -> list[Finding]:
    return group_by_cause(ABOUT[kind], [{name: one.result for name, one in verdicts.items()}])


MAX_FINDINGS = 4
"""Findings shown per layout; the JSON has all of them."""


def compare_runs(reference: ScriptRun, perturbed: Sequence[ScriptRun], layouts: Sequence[ScriptRun], out: Path) -> None:
    """Compare each layout with the reference, and write `report` and `lines` to the file `out`.

    Raises:
        InputError: the script did not record what a proof needs, or is not deterministic.
    """
    expected = load_evidence(reference)
    tolerances = measure_tolerances(expected, [load_evidence(run) for run in perturbed])
    found = [load_evidence(run) for run in layouts]
    results = [compare_script(layout, expected, tolerances) for layout in found]
    epochs = diagnose_epochs(expected)
    own = [] if epochs is None else [Finding("samples", epochs)]
    own += diagnose_optimizer(expected)
    notes = tuple(notes_on_settings(expected, found))
    report = to_json(expected, tolerances, results, own, notes)
    lines = to_lines(expected, tolerances, results, own, notes)
    out.write_text(json.dumps({"report": report, "lines": lines}), "utf-8")


def to_lines(
    reference: ScriptEvidence,
    tolerances: ScriptTolerances,
    results: Sequence[LayoutResult],
    own: Sequence[Finding],
    notes: Sequence[str],
) -> list[str]:
    """Return the lines of the report: tolerances first, then each layout's findings or largest deviations.

    Args:
        own: findings on the script itself, whatever the layout.
        notes: remarks on the script itself.
    """
    lines = [f"reference: {reference.run.layout} on {reference.mesh.axes}", tolerances.note]
    lines += [line for one in own for line in finding_lines(title(one), one.members, one.diagnosis)]
    for result in results:
        layout = result.layout
        mark = "✓" if result.passed else "✗"
        lines.append(f"{mark} {layout.run.layout} on {layout.mesh.axes}" + (f": {_margins(result)}" * result.passed))
        causes = result.causes()
        for one in causes[:MAX_FINDINGS]:
            lines += ["  " + line for line in finding_lines(title(one), one.members, one.diagnosis)]
        if len(causes) > MAX_FINDINGS:
            lines.append(f"  … {counted(len(causes) - MAX_FINDINGS, 'more finding')}: see the JSON")
        lines += [f"  note    {note}" for note in result.notes]
    return lines + [f"note    {note}" for note in notes]


def _margins(result: LayoutResult) -> str:
    """Return the largest deviations of a layout that passed."""
    words = []
    for kind, what in (("gradients", "gradients"), ("parameters", "parameters")):
        errors = [one.error.relative for one in result.deviations[kind].values()]
        words.append(f"{counted(len(errors), what.removesuffix('s'))} within {max(errors, default=math.nan):.1e}")
    return ", ".join(words)


def to_json(
    reference: ScriptEvidence,
    tolerances: ScriptTolerances,
    results: Sequence[LayoutResult],
    own: Sequence[Finding],
    notes: Sequence[str],
) -> dict[str, Any]:
    """Convert the result to JSON-serializable values; the arguments are those of `to_lines`."""
    return {
        "passed": not own and all(result.passed for result in results),
        "script": str(reference.run.script),
        "num_steps": reference.run.num_steps,
        "reference": reference.run.layout.text,
        "tolerance": tolerances.note,
        "findings": [_finding(one) for one in own],
        "layouts": [
            {
                "layout": result.layout.run.layout.text,
                "num_ranks": result.layout.run.layout.num_ranks,
                "axes": str(result.layout.mesh.axes),
                "passed": result.passed,
                "findings": [_finding(one) for one in result.findings],
                "relative_errors": {
                    ABOUT[kind]: {name: _finite(one.error.relative) for name, one in by_name.items()}
                    for kind, by_name in result.deviations.items()
                },
                "notes": result.notes,
            }
            for result in results
        ],
        "notes": list(notes),
    }


def _finding(one: Finding) -> dict[str, Any]:
    diagnosis = one.diagnosis
    return {
        "about": one.about,
        "kind": diagnosis.kind.value,
        "is_consequence": diagnosis.kind is FaultKind.CONSEQUENCE,
        "symptom": diagnosis.symptom,
        "cause": diagnosis.cause,
        "detail": diagnosis.detail,
        "members": list(one.members),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
