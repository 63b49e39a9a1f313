"""Compare a script's layout with its reference, in the order a fault propagates, and diagnose each difference.

Settings and samples come first, then initial weights, gradients, norm and clipping of step 1, updates, and the losses
and norms of all steps. The diagnoses are those of `meshwright prove`, except that the reference is a run of the script.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from meshwright.prove.explain.explain import group_by_cause, narrow_to_axis, shown
from meshwright.prove.explain.gradient_norm import diagnose_norm, suspect_norm
from meshwright.prove.explain.gradients import (
    incomplete,
    misplaced,
    non_finite,
    replicas_differ,
    unrecognised,
    wrong_initial,
)
from meshwright.prove.explain.scalars import diagnose_loss
from meshwright.prove.explain.updates import proportional, still
from meshwright.prove.judge.tensors import Array, LayoutCounts, close, factor_cause
from meshwright.prove.judge.verdicts import SuspectTensor, Verdicts, any_wrong, expected_of, wrong_names
from meshwright.prove.report import finding_lines, finite_json
from meshwright.prove.result import (
    EVERYWHERE,
    UNKNOWN,
    Diagnosis,
    FaultKind,
    Finding,
    StepValue,
    TensorResult,
    rank_words,
    scope_words,
)
from meshwright.prove.script.evidence import (
    FIRST,
    GRADIENT,
    INITIAL,
    SERIES,
    Kind,
    ScriptEvidence,
    ScriptTolerances,
    compare_kind,
    compare_reported,
    load_evidence,
    measure_tolerances,
)
from meshwright.prove.script.gradient_causes import GradientCauses, consequence, drawn_alike, unequal_counts
from meshwright.prove.script.layout_choice import ScriptRun
from meshwright.prove.script.samples import (
    diagnose_batches,
    diagnose_epochs,
    diagnose_optimizer,
    diagnose_settings,
    notes_on_settings,
    other_parameters,
)
from meshwright.units import counted

SAME_FACTOR = 1e-3
"""Relative difference of clipping factors that are the same, if rounding is not coarser."""
COARSE = 0.05
"""Largest rounding with which factors are told apart."""
CHECK_STEP = "the gradients and the norm of step 1 are correct: check the optimizer step, clipping and later gradients"
ONLY_REPORTED = "only what is reported is wrong, since the gradients are right"


def compare_script(layout: ScriptEvidence, reference: ScriptEvidence, tolerances: ScriptTolerances) -> ScriptComparison:
    """Compare a layout with the reference."""
    found = ScriptComparison(layout, reference, tolerances)
    found.compare()
    return found


@dataclass(eq=False)
class ScriptComparison:
    """One layout against the reference: findings, and how far its tensors deviate."""

    layout: ScriptEvidence
    reference: ScriptEvidence
    tolerances: ScriptTolerances
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tensors: dict[Kind, dict[str, TensorResult]] = field(default_factory=dict)
    _fault: str = ""
    """First fault, which makes later values wrong."""
    _wrong_gradients: dict[str, Diagnosis] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.findings

    def compare(self) -> None:
        """Compare all values, earlier ones first."""
        layout, reference = self.layout, self.reference
        self.notes += [layout.note] if layout.note else []
        names, settings = list(other_parameters(layout, reference)), list(diagnose_settings(layout, reference))
        # A fault of the sampler that the reference has too is reported once, for the script.
        samples = diagnose_batches(layout, reference)
        samples = samples or (None if diagnose_epochs(reference) else diagnose_epochs(layout))
        initial = self._initial()
        self._add(names, "other parameters")
        self._add(settings, f"the finding on {settings[0].about}" if settings else "")
        self._add([] if samples is None else [Finding("samples", samples)], "wrong samples")
        self._add(initial, "initial weights that differ")
        before = "wrong samples" if samples else "initial weights that differ" if initial else ""
        before = before or ("other parameters" if names else "")
        losses, norms = (self._reported(about) for about in SERIES)
        loss = losses[0] if losses[0].ok else replace(losses[0], diagnosis=self._loss_cause(losses[0], before))
        self._add(self._gradients(before, loss), "wrong gradients")
        follows = before or ("wrong gradients" if self._wrong_gradients else "")
        norm = [] if not norms or norms[0].ok else [Finding("norm", self._norm(norms[0], follows), step=1)]
        self._add(norm, "a wrong gradient norm")
        self._add(
            [] if norm or self._wrong_gradients else list(self._scaled()), "gradients that are scaled before the step"
        )
        self._add(self._updates(), "a wrong update")
        self._add(list(self._series("loss", losses, before)), "")
        self._add([] if norm else list(self._series("norm", norms, before)), "")

    def _add(self, findings: Sequence[Finding], fault: str) -> None:
        """Add findings; those after them may follow from `fault`."""
        self.findings += findings
        self._fault = self._fault or fault * bool(findings)

    def _counts(self, kind: Kind) -> LayoutCounts:
        """Return the sizes of the layout, with the rounding of one kind of tensor."""
        rounding, num_samples = min(self.tolerances.usual(kind), COARSE), self.reference.batch(1).total()
        return LayoutCounts(self.layout.axes, self.layout.num_microbatches, num_samples, rounding=rounding)

    def _verdicts(self, kind: Kind) -> Verdicts:
        counts = self._counts(kind)
        found, num_skipped = compare_kind(self.layout, self.reference, kind, counts, self.tolerances)
        if num_skipped and kind == FIRST:
            num_all = sum(one.suspect.expected.size for one in found.values())
            self.notes.append(
                f"{num_skipped} of {num_all} elements have a gradient of rounding size in step 1, which may move them "
                "either way: their weights are not compared"
            )
        return found

    def _initial(self) -> list[Finding]:
        verdicts = self._verdicts(INITIAL)
        found = _explained(verdicts, lambda suspect: wrong_initial(suspect, expected_of(verdicts)))
        self.tensors[INITIAL] = _results(drawn_alike(self.layout, found))
        return group_by_cause("initial", [self.tensors[INITIAL]])

    def _gradients(self, before: str, loss: StepValue) -> list[Finding]:
        verdicts, counts = self._verdicts(GRADIENT), self._counts(GRADIENT)
        causes = GradientCauses(self.layout, self.reference, verdicts, counts, before, loss)
        found = self.tensors[GRADIENT] = _results(narrow_to_axis(causes.explained(), counts))
        self._wrong_gradients = {name: one.diagnosis for name, one in found.items() if one.diagnosis is not None}
        return group_by_cause("gradient", [found])

    def _norm(self, norm: StepValue, follows: str) -> Diagnosis:
        """Return the cause of a wrong norm of step 1."""
        if follows:
            return consequence("wrong in step 1", follows)
        twice = {name for group in self.reference.tied for name in group[1:]}
        assemblies = {name: v.suspect.assembly for name, v in self._verdicts(GRADIENT).items() if name not in twice}
        counts = self._counts(GRADIENT)
        counts = replace(counts, rounding=max(norm.tolerance, counts.rounding))
        return diagnose_norm(suspect_norm(norm, assemblies, counts))

    def _scaled(self) -> Iterator[Finding]:
        """Compare what scales gradients before the optimizer's step."""
        due = next((value for record in self.reference.ranks for value in record.scaled), None)
        found = {rank: record.scaled[0] for rank, record in enumerate(self.layout.ranks) if record.scaled}
        counts = self._counts(GRADIENT)
        same = max(SAME_FACTOR, counts.rounding)
        if due is None or all(close(value, due, same) for value in found.values()):
            return
        low, high = min(found, key=lambda rank: found[rank]), max(found, key=lambda rank: found[rank])
        expected = f"{due:.4g} in the reference, between recorder.gradients() and the optimizer's step"
        idle = [rank for rank, value in found.items() if close(value, 1.0, same)]
        symptom = f"scaled by {found[low]:.4g}, by {expected}"
        if len(idle) == len(found):
            symptom, cause = f"not scaled, by {expected}", "gradients are not clipped"
        elif idle and all(rank in idle or close(value, due, same) for rank, value in found.items()):
            symptom, cause = f"not clipped on {rank_words(idle)}, scaled by {expected}", "every rank has to clip"
        elif not close(found[low], found[high], same):
            symptom = f"scaled by {found[low]:.4g} on rank {low} and {found[high]:.4g} on rank {high}, by {expected}"
            cause = "gradients are clipped by a norm of each rank's own shards: reduce the norm over all ranks"
        else:
            factor = factor_cause(found[low] / due, counts) if close(due, 1.0, same) else ""
            cause = factor or "clipping with another norm or limit"
        yield Finding("clipping", Diagnosis(FaultKind.NORM_MEMBERS, symptom, cause))

    def _updates(self) -> list[Finding]:
        """Compare parameters after the first and the last step."""
        verdicts = {kind: self._verdicts(kind) for kind in self.layout.kinds if kind[0] == "update"}
        if not self._fault and not any_wrong(verdicts[FIRST]) and any(map(any_wrong, verdicts.values())):
            self._add(list(self._uncleared()), "gradients that are not cleared")
        for kind, found in verdicts.items():
            self.tensors[kind] = _results(_explained(found, partial(self._update_cause, expected_of(found))))
            self._fault = self._fault or "a wrong update in step 1" * any_wrong(found)
        return group_by_cause("update", [self.tensors[kind] for kind in verdicts])

    def _update_cause(self, references: Mapping[str, Array], suspect: SuspectTensor) -> Diagnosis:
        """Return the likely cause of a parameter that is wrong after a step."""
        name = suspect.assembly.name
        if own := "its wrong gradient" if name in self._wrong_gradients else self._fault:
            return consequence(f"wrong {suspect.scope_text()}", own)
        initial = self.reference.fulls(INITIAL)[name]
        found = incomplete(suspect) or non_finite(suspect)
        if found is None and (ranks := still(suspect, initial)):
            found = self._not_updated(suspect, ranks)
        found = found or misplaced(suspect, references) or proportional(suspect, initial)
        if found is not None or (found := replicas_differ(suspect)) is not None:
            return found
        base = unrecognised(suspect)
        return replace(base, cause=f"{base.cause}; {CHECK_STEP}")

    def _not_updated(self, suspect: SuspectTensor, ranks: set[int]) -> Diagnosis:
        """Tell ranks whose optimizer takes no step from single parameters that it leaves out."""
        records = [self.layout.ranks[rank] for rank in suspect.wrong_ranks]
        none = all(
            torch.equal(value, record.initial[name][1])
            for record in records
            for name, (_, value) in record.steps[0]["weights"].items()
        )
        if none and all(any(record.optimized.values()) for record in records):
            whose = rank_words(suspect.wrong_ranks)
            cause = f"the optimizer takes no step on {whose}"
            cause += ", or gradients were cleared before it" * (not all(record.scaled for record in records))
            return Diagnosis(FaultKind.NOT_UPDATED, f"no parameter is updated in step 1 on {whose}", cause)
        scope = scope_words(ranks, suspect.informative_ranks, suspect.counts.axes)
        cause = "the parameter is not in the optimizer, or its gradient was cleared before the step"
        if scope != EVERYWHERE:
            cause = f"the optimizer skipped {rank_words(ranks)}'s shard"
        return Diagnosis(FaultKind.NOT_UPDATED, f"never updated, still at its initial value {scope}", cause)

    def _uncleared(self) -> Iterator[Finding]:
        """Recognise gradients that are still there when step 2 begins, though not in the reference."""
        left = {rank: record.uncleared for rank, record in enumerate(self.layout.ranks) if record.uncleared}
        if not left or any(record.uncleared for record in self.reference.ranks):
            return
        names = tuple(dict.fromkeys(name for found in left.values() for name in found))
        symptom = f"gradients of step 1 are still there when step 2 begins, on {rank_words(left)}"
        cause = "gradients are not cleared after the step, so later ones are added to them: zero_grad is missing there"
        diagnosis = Diagnosis(FaultKind.CONTRIBUTIONS, symptom, cause)
        yield Finding("gradient", diagnosis, names, len(self.layout.shapes))

    def _reported(self, about: str) -> tuple[StepValue, ...]:
        """Compare losses or norms; norms that the reference doesn't report are not compared."""
        if not any(self.reference.series(SERIES[about], 1)):
            return ()
        return compare_reported(self.layout, self.reference, about, self.tolerances.series[about])

    def _loss_cause(self, step: StepValue, follows: str) -> Diagnosis:
        counts = replace(self._counts(GRADIENT), rounding=step.tolerance)
        return diagnose_loss(step, None, counts, root_fault=follows)

    def _series(self, about: str, steps: Sequence[StepValue], before: str) -> Iterator[Finding]:
        """Diagnose the first wrong loss or norm."""
        wrong = next((step for step in steps if not step.ok), None)
        if wrong is None:
            return
        found = self._loss_cause(wrong, before if wrong.step == 1 else self._fault)
        for other in steps if wrong.step > 1 else ():
            if all(close(value, other.expected, wrong.tolerance) for value in wrong.observed):
                symptom = f"that of step {other.step} of the reference"
                away = other.step - wrong.step
                cause = f"{counted(abs(away), 'step')} {'behind' if away < 0 else 'ahead'}"
                found = Diagnosis(FaultKind.OTHER_STEP, symptom, cause)
        kinds = {one.kind for one in self._wrong_gradients.values()}
        if found.kind is FaultKind.UNRECOGNISED and kinds and not kinds & set(UNKNOWN):
            found = consequence(found.symptom, "what is wrong with the gradients")
        elif found.kind is FaultKind.UNRECOGNISED and not kinds:
            # Right gradients are those of a right forward pass.
            unequal = unequal_counts(self.layout, wrong) if (about, wrong.step) == ("loss", 1) else None
            found = unequal or replace(
                found, cause=ONLY_REPORTED + ": it is not the mean over the global batch" * (about == "loss")
            )
        yield Finding(about, found, step=wrong.step)


def _explained(verdicts: Verdicts, diagnose: Callable[[SuspectTensor], Diagnosis]) -> Verdicts:
    return verdicts | {
        name: verdicts[name].with_diagnosis(diagnose(verdicts[name].suspect)) for name in wrong_names(verdicts)
    }


def _results(verdicts: Verdicts) -> dict[str, TensorResult]:
    return {name: one.result for name, one in verdicts.items()}


def compare_runs(reference: ScriptRun, perturbed: Sequence[ScriptRun], layouts: Sequence[ScriptRun], out: Path) -> None:
    """Compare each layout with the reference, and write `report` and `lines` to the file `out`.

    Raises:
        InputError: the script did not record what a proof needs, or is not deterministic.
    """
    expected = load_evidence(reference)
    tolerances = measure_tolerances(expected, [load_evidence(run) for run in perturbed])
    results = [compare_script(load_evidence(run), expected, tolerances) for run in layouts]
    epochs = diagnose_epochs(expected)
    own = [] if epochs is None else [Finding("samples", epochs)]
    own += diagnose_optimizer(expected)
    notes = list(notes_on_settings(expected, [result.layout for result in results]))
    lines = [f"reference: {reference.layout} on {expected.axes}", tolerances.note, *finding_lines(own, [])]
    lines += [line for result in results for line in _layout_lines(result)]
    report = {
        "passed": not own and all(result.passed for result in results),
        "script": str(reference.script),
        "num_steps": reference.num_steps,
        "reference": reference.layout.text,
        "tolerance": tolerances.note,
        "findings": [_finding_json(one) for one in own],
        "layouts": [_layout_json(result) for result in results],
        "notes": notes,
    }
    lines += [f"note    {note}" for note in notes]
    out.write_text(json.dumps({"report": finite_json(report), "lines": lines}), "utf-8")


def _layout_lines(result: ScriptComparison) -> Iterator[str]:
    where = f"{result.layout.run.layout} on {result.layout.axes}"
    yield f"✓ {where}: {_margins(result)}" if result.passed else f"✗ {where}"
    yield from ("  " + line for line in finding_lines(result.findings, [f"note    {note}" for note in result.notes]))


def _errors(result: ScriptComparison) -> dict[str, dict[str, float]]:
    """Return the relative error of each tensor, by kind; of parameters, that of the step that is shown."""
    kinds = dict.fromkeys(about for about, _ in result.tensors)
    found = {kind: shown([result.tensors[one] for one in result.tensors if one[0] == kind]) for kind in kinds}
    return {kind: {name: one.error.relative for name, one in results.items()} for kind, results in found.items()}


def _margins(result: ScriptComparison) -> str:
    """Return the largest deviations of a layout that passed."""
    errors = _errors(result)
    return ", ".join(
        f"{counted(len(errors[kind]), what)} within {max(errors[kind].values(), default=math.nan):.1e}"
        for kind, what in (("gradient", "gradient"), ("update", "parameter"))
    )


def _layout_json(result: ScriptComparison) -> dict[str, Any]:
    return {
        "layout": result.layout.run.layout.text,
        "num_ranks": result.layout.run.layout.num_ranks,
        "axes": str(result.layout.axes),
        "passed": result.passed,
        "findings": [_finding_json(one) for one in result.findings],
        "relative_errors": _errors(result),
        "notes": result.notes,
    }


def _finding_json(one: Finding) -> dict[str, Any]:
    diagnosis = asdict(one.diagnosis)
    return {
        "about": one.about,
        "step": one.step,
        "kind": one.diagnosis.kind.value,
        "is_consequence": one.is_consequence,
        **{key: diagnosis[key] for key in ("symptom", "cause", "detail")},
        "members": list(one.members),
    }
