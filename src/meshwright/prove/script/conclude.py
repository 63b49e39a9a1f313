"""Compare a script's layout with its reference, in the order a fault propagates, and diagnose each difference.

Settings and samples come first, then initial weights, gradients, norm and loss of step 1, its update, and later steps.
The diagnoses are those of `meshwright prove`, except that the reference is a run of the script itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from meshwright.prove.compare.conclude import missing_gradient, narrow_to_axis, with_empty_shards
from meshwright.prove.compare.result import Diagnosis, FaultKind, SeriesResult, TensorResult
from meshwright.prove.compare.scalar_verdict import explain_first_norm
from meshwright.prove.compare.tensor_shards import Array, max_difference
from meshwright.prove.compare.tensor_verdict import TensorVerdict, Verdicts, compare_tensors
from meshwright.prove.diagnose.factors import LayoutCounts, factor_cause
from meshwright.prove.diagnose.gradients import DiagnosisContext, diagnose_gradient
from meshwright.prove.diagnose.losses import diagnose_loss, diagnose_series
from meshwright.prove.diagnose.weights import UpdateHistory, diagnose_initial, diagnose_update
from meshwright.prove.record.evidence import RecordedShard
from meshwright.prove.report import ReportedFinding, group_by_cause
from meshwright.prove.script.evidence import ScriptEvidence, Shards
from meshwright.prove.script.losses import compare_reported
from meshwright.prove.script.samples import diagnose_batches, diagnose_epochs
from meshwright.prove.script.settings import diagnose_settings, names_text, untied
from meshwright.prove.script.tolerances import ScriptTolerances, noisy_elements

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
    findings: list[ReportedFinding] = field(default_factory=list)
    deviations: dict[str, dict[str, TensorResult]] = field(default_factory=dict)
    """[kind][name]"""
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.findings

    def causes(self) -> list[ReportedFinding]:
        """Return the findings that follow from no other, or all if there are no such."""
        roots = [one for one in self.findings if one.diagnosis.kind is not FaultKind.CONSEQUENCE]
        return roots or self.findings


class _Comparison:
    """One layout against the reference; `fault` describes the first fault that makes later values wrong."""

    def __init__(self, layout: ScriptEvidence, reference: ScriptEvidence, tolerances: ScriptTolerances) -> None:
        self.layout, self.reference, self.tolerances = layout, reference, tolerances
        self.fault, self.wrong_gradients = "", set[str]()
        self.result = LayoutResult(layout)
        num_samples = sum(len(record.samples[0]) for record in reference.records)
        self._counts = LayoutCounts(layout.mesh.axes, layout.microbatches, num_samples)

    def counts(self, kind: str) -> LayoutCounts:
        """Return the sizes of the layout, with the rounding of one kind of tensor."""
        return replace(self._counts, rounding=min(self.tolerances.usual(kind), COARSE))

    def add(self, findings: list[ReportedFinding], fault: str) -> None:
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
    run.add(list(_names(run)), "other parameters")
    settings = list(diagnose_settings(layout, reference))
    # A fault of the sampler that the reference has too is reported once, for the script.
    samples = diagnose_batches(layout, reference) or (None if diagnose_epochs(reference) else diagnose_epochs(layout))
    initial = _initial(run)
    run.add(settings, f"the finding on {settings[0].about}" if settings else "")
    run.add([] if samples is None else [ReportedFinding("samples", samples)], "wrong samples")
    run.add(initial, "initial weights that differ")
    before = "wrong samples" if samples is not None else "initial weights that differ" if initial else ""
    run.add(_gradients(run, before), "wrong gradients")
    norm = list(_norm(run, before))
    run.add(norm, "a wrong gradient norm")
    run.add(list(_first_loss(run, before)), "a wrong loss")
    run.add([] if norm else list(_scaled(run)), "gradients that are scaled before the step")
    first = _updates(run, "after_first", {})
    run.add(first, "a wrong update in step 1")
    wrong = {name for one in first for name in one.members}
    run.add(_updates(run, "parameters", dict.fromkeys(wrong, "its wrong update in step 1")), "a wrong update")
    run.add(list(_later_series(run)), "")
    if layout.mesh.note:
        run.result.notes.append(layout.mesh.note)
    return run.result


def _names(run: _Comparison) -> Iterator[ReportedFinding]:
    expected, found = run.reference.shapes, run.layout.shapes
    for what, names in (
        ("in the reference but not in the layout", [name for name in expected if name not in found]),
        ("in the layout but not in the reference", [name for name in found if name not in expected]),
        ("of another shape", [name for name in found if expected.get(name, found[name]) != found[name]]),
    ):
        if names:
            cause = "the two sides do not hold the same parameters: a stage that renumbers its layers needs names="
            yield ReportedFinding("parameters", Diagnosis(FaultKind.EVIDENCE, f"{what}: {names_text(names)}", cause))


def _initial(run: _Comparison) -> list[ReportedFinding]:
    expected = _expected(run, "initial")
    verdicts = run.verdicts("initial", run.layout.shards("initial"), expected)
    context = DiagnosisContext(expected)
    return _grouped("initial", _diagnosed(verdicts, lambda one: diagnose_initial(one.suspect, context)))


def _gradients(run: _Comparison, before: str) -> list[ReportedFinding]:
    expected, parameters = _expected(run, "gradients"), run.layout.shards("parameters")
    recorded = run.layout.shards("gradients")
    shards = {name: with_empty_shards(recorded.get(name, []), parameters.get(name, [])) for name in expected}
    counts = run.counts("gradients")
    context = DiagnosisContext(expected, "samples" in before, "initial" in before)
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
    if not before:
        found = _overwritten(run, _copies_not_summed(run, found))
    return _grouped("gradients", found)


def _overwritten(run: _Comparison, verdicts: Verdicts) -> Verdicts:
    """Recognise gradients of which each micro-batch cleared what the one before had left."""
    lost, found = run.layout.shards("before_microbatches"), dict(verdicts)
    for name, verdict in verdicts.items():
        if verdict.result.ok or not lost.get(name):
            continue
        suspect, by_rank = verdict.suspect, {shard.rank: shard.value.double().numpy() for shard in lost[name]}
        pairs = [(one, by_rank.get(one.rank)) for one in suspect.wrong_shards]
        if all(
            left is not None
            and left.shape == one.value.shape
            and suspect.matches(one.value + left, one.slice_of(suspect.expected), max_difference(left, 0 * left)[0])
            for one, left in pairs
        ):
            cause = "each micro-batch overwrites the gradient of the previous one: accumulation is missing"
            symptom = f"only the last micro-batch is present {suspect.scope_text()}"
            found[name] = verdict.with_diagnosis(Diagnosis(FaultKind.CONTRIBUTIONS, symptom, cause))
    return found


def _copies_not_summed(run: _Comparison, verdicts: Verdicts) -> Verdicts:
    """Recognise copies of a tied weight on several stages, each with its own gradient only."""
    found = dict(verdicts)
    for group in {tuple(group) for record in run.reference.records for group in record.tied}:
        wrong = [name for name in group if name in found and not found[name].result.ok]
        if len(wrong) < 2 or any(found[name].suspect.assembly.faults for name in wrong):
            continue
        suspects = [found[name].suspect for name in wrong]
        replicas = [next(iter(suspect.assembly.replicas()), None) for suspect in suspects]
        total = np.sum([replica.value for replica in replicas if replica is not None], axis=0)
        if suspects[0].matches(total, suspects[0].expected, float(np.abs(suspects[0].expected).max())):
            cause = "the sum over the copies of the tied weight is missing: their gradients sum to the reference"
            for name in wrong:
                diagnosis = Diagnosis(FaultKind.SUM_MISSING, "each copy holds only its own contribution", cause)
                found[name] = found[name].with_diagnosis(diagnosis)
    return found


def _norm(run: _Comparison, before: str) -> Iterator[ReportedFinding]:
    if not any(record.norms[0] for record in run.reference.records):
        return
    norms = compare_reported(run.layout, run.reference, "norms", run.tolerances.norms)
    if norms.steps[0].ok:
        return
    if fault := before or ("wrong gradients" if run.wrong_gradients else ""):
        yield ReportedFinding("norm", Diagnosis(FaultKind.CONSEQUENCE, "wrong in step 1", f"follows from {fault}"))
        return
    expected = _expected(run, "gradients")
    twice = {name for record in run.reference.records for group in record.tied for name in group[1:]}
    verdicts = run.verdicts("gradients", run.layout.shards("gradients"), expected)
    assemblies = {name: one.suspect.assembly for name, one in verdicts.items() if name not in twice}
    counts = replace(run.counts("gradients"), rounding=max(run.tolerances.norms[0], run.counts("gradients").rounding))
    found = explain_first_norm(SeriesResult(norms.steps[:1]), assemblies, counts, None, gradients_wrong=False)
    if found.diagnosis is not None:
        yield ReportedFinding("norm", found.diagnosis)


def _first_loss(run: _Comparison, before: str) -> Iterator[ReportedFinding]:
    step = compare_reported(run.layout, run.reference, "losses", run.tolerances.losses).steps[0]
    if not step.ok:
        counts = replace(run.counts("gradients"), rounding=step.tolerance)
        yield ReportedFinding("loss", diagnose_loss(step, None, counts, root_fault=before))


def _scaled(run: _Comparison) -> Iterator[ReportedFinding]:
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
    if found[high] - found[low] > same * found[high]:
        symptom = f"scaled by {found[low]:.4g} on rank {low} and {found[high]:.4g} on rank {high}, by {expected}"
        cause = "gradients are clipped by a norm of each rank's own shards: reduce the norm over all ranks"
    else:
        factor = factor_cause(found[low] / due[0], run.counts("gradients")) if abs(due[0] - 1.0) <= same else ""
        symptom, cause = f"scaled by {found[low]:.4g}, by {expected}", factor or "clipping with another norm or limit"
    yield ReportedFinding("clipping", Diagnosis(FaultKind.NORM_MEMBERS, symptom, cause))


def _updates(run: _Comparison, kind: str, own_faults: dict[str, str]) -> list[ReportedFinding]:
    expected, initial = _expected(run, kind), _expected(run, "initial")
    shards, num_skipped = _without_noise(run, run.layout.shards(kind), expected)
    if num_skipped:
        note = (
            f"{num_skipped} of {sum(value.size for value in expected.values())} elements have a gradient of rounding "
        )
        note += "size in step 1, which may move them either way: their weights are not compared"
        run.result.notes += [] if note in run.result.notes else [note]
    verdicts = run.verdicts(kind, shards, expected)
    context = DiagnosisContext(expected)

    def cause(one: TensorVerdict) -> Diagnosis:
        name = one.suspect.assembly.name
        own = "its wrong gradient" if name in run.wrong_gradients else own_faults.get(name, "")
        history = UpdateHistory(initial.get(name), own_fault=own, root_fault=run.fault)
        if history.root_fault:
            follows = f"follows from {own or run.fault}"
            return Diagnosis(FaultKind.CONSEQUENCE, f"wrong {one.suspect.scope_text()}", follows)
        return diagnose_update(one.suspect, context, history)

    return _grouped(kind, _diagnosed(verdicts, cause))


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


def _later_series(run: _Comparison) -> Iterator[ReportedFinding]:
    for name, about, limits in (
        ("losses", "loss", run.tolerances.losses),
        ("norms", "norm", run.tolerances.norms),
    ):
        if not any(record.norms[0] for record in run.reference.records) and name == "norms":
            continue
        steps = compare_reported(run.layout, run.reference, name, limits).steps
        if steps[0].ok and not all(step.ok for step in steps):
            wrong = bool(run.fault)
            yield ReportedFinding(about, diagnose_series(steps, None, name=about, update_wrong=wrong))


def _expected(run: _Comparison, kind: str) -> dict[str, Array]:
    """Return the reference's tensors of one kind, but for parameters that the layout lacks or shapes otherwise."""
    shapes = run.layout.shapes
    return {name: full for name, full in run.reference.fulls(kind).items() if shapes.get(name) == full.shape}


def _diagnosed(verdicts: Verdicts, diagnose: Callable[[TensorVerdict], Diagnosis]) -> Verdicts:
    return {name: one if one.result.ok else one.with_diagnosis(diagnose(one)) for name, one in verdicts.items()}


def _grouped(kind: str, verdicts: Verdicts) -> list[ReportedFinding]:
    return group_by_cause(ABOUT[kind], [(name, one.result) for name, one in verdicts.items()])
