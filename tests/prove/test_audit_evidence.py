"""Evidence that is missing, vacuous or at odds with itself never passes, and is named."""

from __future__ import annotations

import pytest

from meshwright.mesh.axes import Axes
from meshwright.prove.report import render, to_json
from meshwright.prove.result import FaultKind
from tests.prove.synthetic import MATRIX, Case, conclude_with


def of_reference(change):
    """Change the reference, in all steps."""
    return lambda reference, records: change(reference)


def of_ranks(change):
    """Change the records of all ranks."""
    return lambda reference, records: [change(record) for record in records]


def fill(step, value, names=(MATRIX,)):
    return of_reference(lambda one: [one.parts[step - 1][name].fill_(value) for name in names])


def lose_from_steps(kind):
    return of_ranks(lambda record: [step[kind].pop(MATRIX) for step in record.steps])


def hold_in_full(reference, records):
    for record in records:
        record.steps[1]["weights"][MATRIX] = (0, 0), reference.initial[MATRIX].clone()


def differ(reference, records):
    for what, error in (("initial weight", 0.5), ("gradient of step 1", 1)):
        records[0].unequal.append(("embed.weight", 0, 3, what, error))


CASES = {
    "records of 0 ranks": lambda reference, records: records.clear(),
    "records of 1 rank: the layout has 2 ranks": lambda reference, records: records.pop(),
    "records of 2 steps on rank 1: the proof has 3 steps": lambda reference, records: records[1].steps.pop(),
    "the reference has no parameters": of_reference(lambda one: one.initial.clear()),
    "the reference has no gradients": of_reference(lambda one: one.parts[0].clear()),
    f"gradient of step 2 in the layout but not in the reference: {MATRIX}":
        of_reference(lambda one: one.parts[1].pop(MATRIX)),
    f"initial weight in the reference but not in the layout: {MATRIX}":
        of_ranks(lambda record: record.initial.pop(MATRIX)),
    f"initial weight in the layout but not in the reference: {MATRIX}":
        of_reference(lambda one: [one.initial.pop(MATRIX), *(parts.pop(MATRIX) for parts in one.parts)]),
    f"parameter after step 1 in the reference but not in the layout: {MATRIX}": lose_from_steps("weights"),
    "all gradients of the reference are zero": lambda reference, records: [
        parts.zero_() for parts in reference.parts[0].values()
    ],
    "the batch of step 1 has 3 samples": of_reference(lambda one: setattr(one, "batch", lambda step: [0, 1, 2])),
    "the loss of step 3 is not finite in the reference": of_reference(lambda one: one.losses[2].fill_(float("nan"))),
    f"gradient of step 2 not finite in the reference: {MATRIX}": fill(2, float("inf")),
    f"after step 2, parameters of which ranks 0 and 1 had a shard are held in full: {MATRIX}": hold_in_full,
    "initial weight: the copies of embed.weight on stages 0 and 3 of rank 0 differ by up to 0.5": differ,
    "may follow from differing copies: initial weight": differ,
}  # fmt: skip


@pytest.mark.parametrize("words", CASES)
def test_unfit_evidence_is_named(words):
    case = Case(Axes(dp_shard=2))
    records = case.layout.records()
    CASES[words](case.reference, records)
    result = conclude_with(case.reference, records, case.axes)
    findings = [one.diagnosis for one in result.findings if one.about == "evidence"]
    assert not result.passed and any(words in found.text for found in findings), [f.text for f in findings]
    kinds = {FaultKind.EVIDENCE} if "copies" not in words else {FaultKind.REPLICAS_DIFFER, FaultKind.CONSEQUENCE}
    assert {found.kind for found in findings} == kinds
    report = to_json(result, loss_unit="nats/token")
    assert not report["passed"] and any(words in text for text in report["evidence"]) and render(result)


def test_a_gradient_that_is_not_there_is_the_parameters():
    case = Case(Axes(dp_shard=2))
    records = case.layout.records()
    lose_from_steps("gradients")(case.reference, records)
    result = conclude_with(case.reference, records, case.axes)
    assert [(one.about, one.step, one.members) for one in result.findings][0] == ("gradient", 1, (MATRIX,))
