"""Loads what the ranks of all runs recorded, compares, and writes the report for `prove_script`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.prove.compare.result import FaultKind
from meshwright.prove.report import ReportedFinding, finding_lines
from meshwright.prove.script.conclude import ABOUT, LayoutResult, compare_script
from meshwright.prove.script.evidence import ScriptEvidence, load_evidence
from meshwright.prove.script.layout_choice import ScriptRun
from meshwright.prove.script.samples import diagnose_epochs
from meshwright.prove.script.settings import diagnose_optimizer, notes_on_settings
from meshwright.prove.script.tolerances import ScriptTolerances, measure_tolerances
from meshwright.units import counted

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
    own = [] if epochs is None else [ReportedFinding("samples", epochs)]
    own += diagnose_optimizer(expected)
    notes = tuple(notes_on_settings(expected, found))
    report = to_json(expected, tolerances, results, own, notes)
    lines = to_lines(expected, tolerances, results, own, notes)
    out.write_text(json.dumps({"report": report, "lines": lines}), "utf-8")


def to_lines(
    reference: ScriptEvidence,
    tolerances: ScriptTolerances,
    results: Sequence[LayoutResult],
    own: Sequence[ReportedFinding],
    notes: Sequence[str],
) -> list[str]:
    """Return the lines of the report: tolerances first, then each layout's findings or largest deviations.

    Args:
        own: findings on the script itself, whatever the layout.
        notes: remarks on the script itself.
    """
    lines = [f"reference: {reference.run.layout} on {reference.mesh.axes}", tolerances.note]
    lines += [line for one in own for line in finding_lines(one.title(), one.members, one.diagnosis)]
    for result in results:
        layout = result.layout
        mark = "✓" if result.passed else "✗"
        lines.append(f"{mark} {layout.run.layout} on {layout.mesh.axes}" + (f": {_margins(result)}" * result.passed))
        causes = result.causes()
        for one in causes[:MAX_FINDINGS]:
            lines += ["  " + line for line in finding_lines(one.title(), one.members, one.diagnosis)]
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
    own: Sequence[ReportedFinding],
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


def _finding(one: ReportedFinding) -> dict[str, Any]:
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
