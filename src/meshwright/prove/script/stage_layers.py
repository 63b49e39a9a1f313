"""Faults of how pipeline stages share out the layers of a model: left out, renumbered, or drawn alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from meshwright.prove.compare.result import Diagnosis, FaultKind
from meshwright.prove.compare.tensor_verdict import Verdicts
from meshwright.prove.report import ReportedFinding
from meshwright.prove.script.evidence import ScriptEvidence
from meshwright.prove.script.settings import names_text


def stages_of(layout: ScriptEvidence) -> dict[str, list[int]]:
    """Return the pipeline stages that hold each parameter."""
    found: dict[str, list[int]] = defaultdict(list)
    for rank, record in enumerate(layout.records):
        stage = layout.mesh.axes.coordinate(rank)["pp"]
        for name in record.shapes:
            if stage not in found[name]:
                found[name].append(stage)
    return found


def other_parameters(layout: ScriptEvidence, reference: ScriptEvidence) -> Iterator[ReportedFinding]:
    """Yield a finding for parameters that only one side has, or in another shape."""
    expected, found = reference.shapes, layout.shapes
    extra = [name for name in found if name not in expected]
    stages = stages_of(layout)
    renumbered = "the two sides do not hold the same parameters: a stage that renumbers its layers needs names="
    left_out = "no stage holds them, and none renumbers its layers: stages leave out layers, such as those at a border"
    only_lacks = layout.mesh.axes.pp > 1 and not extra and all(len(stages[name]) == 1 for name in found)
    for what, names, cause in (
        (
            "in the reference but not in the layout",
            [name for name in expected if name not in found],
            left_out if only_lacks else renumbered,
        ),
        ("in the layout but not in the reference", extra, renumbered),
        ("of another shape", [name for name in found if expected.get(name, found[name]) != found[name]], renumbered),
    ):
        if names:
            yield ReportedFinding("parameters", Diagnosis(FaultKind.EVIDENCE, f"{what}: {names_text(names)}", cause))


def drawn_alike(layout: ScriptEvidence, verdicts: Verdicts) -> Verdicts:
    """Recognise stages whose weights are those of another stage's layers, since all draw from the same seed."""
    stages, alike = stages_of(layout), {}
    wrong = {name: one for name, one in verdicts.items() if not one.result.ok}
    for name, one in wrong.items():
        old = one.result.diagnosis
        if old is not None and old.kind is FaultKind.MISPLACED:
            other = old.symptom.removeprefix("the reference of ").split(" ")[0]
            if other in stages and not set(stages[other]) & set(stages[name]):
                alike[name] = f"{name} starts as {other}"
    mine = {stage for name in alike for stage in stages[name]}
    found = dict(verdicts)
    for name, one in wrong.items():
        if name in alike:
            symptom = "initial weights are those of another stage's parameters"
            cause = "each stage draws only its own weights, from the same seed: draw the whole model on every rank"
            found[name] = one.with_diagnosis(Diagnosis(FaultKind.MISPLACED, symptom, cause, alike[name]))
        elif mine & set(stages[name]):
            follows = "follows from a stage that draws only its own weights"
            found[name] = one.with_diagnosis(Diagnosis(FaultKind.CONSEQUENCE, "initial weights differ", follows))
    return found
