"""Loads what the ranks of all runs recorded, compares, and writes the report for `prove_script`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from meshwright.prove.report import ReportedFinding
from meshwright.prove.script.conclude import compare_script
from meshwright.prove.script.evidence import load_evidence
from meshwright.prove.script.layout_choice import ScriptRun
from meshwright.prove.script.report import to_json, to_lines
from meshwright.prove.script.samples import diagnose_epochs
from meshwright.prove.script.settings import diagnose_optimizer, notes_on_settings
from meshwright.prove.script.tolerances import measure_tolerances


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
