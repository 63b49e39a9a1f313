"""Evidence that is missing, vacuous or at odds with itself never passes, and is named."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from meshwright.mesh.axes import Axes
from meshwright.prove.compare.conclude import compare
from meshwright.prove.record.evidence import LayoutEvidence, ReferenceEvidence
from meshwright.prove.report import render, to_json
from tests.prove.synthetic import make_layout, make_reference

AXES = Axes(dp_shard=2)
MATRIX = "blocks.0.attn.q.weight"


def change(part, value):
    """Replace a field of one side."""
    side, field = part.split(".")

    def apply(sides):
        sides[side] = dataclasses.replace(sides[side], **{field: value(getattr(sides[side], field))})

    return apply


def without(mapping):
    return {name: value for name, value in mapping.items() if name != MATRIX}


CASES = {
    "the layout has no parameters": change("layout.parameters", lambda old: {}),
    "the layout has no gradients": change("layout.gradients", lambda old: {}),
    "the reference has no parameters": change("reference.parameters", lambda old: {}),
    "the reference has no gradients": change("reference.gradients", lambda old: {}),
    "the reference has no steps": change("reference.losses", lambda old: []),
    f"gradient in the reference but not in the layout: {MATRIX}": change("layout.gradients", without),
    f"parameter in the reference but not in the layout: {MATRIX}": change("layout.parameters", without),
    f"parameter in the layout but not in the reference: {MATRIX}": change("reference.parameters", without),
    f"gradient in the layout but not in the reference: {MATRIX}": change("reference.gradients", without),
    f"initial weight in the reference but not in the layout: {MATRIX}": change("layout.initial", without),
    "the reference has 3 losses and 2 gradient norms": change("reference.grad_norms", lambda old: old[:2]),
    "the reference has 3 losses and 1 batches": change("reference.samples", lambda old: old[:1]),
    "losses of 1 rank": change("layout.losses", lambda old: old[:1]),
    "gradient norms of 2 steps on rank 1": change("layout.grad_norms", lambda old: [old[0], old[1][:2]]),
    "samples of 0 steps on ranks 0 and 1": change("layout.samples", lambda old: [[], []]),
    "all gradients of the reference are zero": change(
        "reference.gradients", lambda old: {name: torch.zeros_like(value) for name, value in old.items()}
    ),
    "the batch of step 1 has 3 samples": change("reference.samples", lambda old: [[0, 1, 2], *old[1:]]),
    "a loss of the reference is not finite": change("reference.losses", lambda old: [float("nan"), *old[1:]]),
    f"parameter not finite in the reference: {MATRIX}": change(
        "reference.parameters", lambda old: {**old, MATRIX: old[MATRIX] * float("nan")}
    ),
    f"the partial gradients of {MATRIX} do not sum": change(
        "reference.partial_gradients", lambda old: {**old, MATRIX: old[MATRIX] * 1.1}
    ),
    f"partial gradients of {MATRIX} have shape": change(
        "reference.partial_gradients", lambda old: {**old, MATRIX: old[MATRIX][:1]}
    ),
    "is not the norm of its gradients": change("reference.grad_norms", lambda old: [old[0] * 2, *old[1:]]),
}


@pytest.mark.parametrize("words", CASES)
def test_unfit_evidence_is_named(words):
    reference = make_reference(2, 1)
    sides = {"reference": reference, "layout": make_layout(reference, AXES)}
    CASES[words](sides)
    result = compare(sides["layout"], sides["reference"])
    assert not result.passed
    assert any(words in finding.text for finding in result.findings), [f.text for f in result.findings]
    assert not to_json(result, loss_unit="nats/token")["passed"]
    assert render(result)


def test_nothing_at_all_does_not_pass():
    layout = LayoutEvidence(Axes(), 1, [], [], [], {}, {})
    result = compare(layout, ReferenceEvidence([], [], [], {}, {}, {}, {}))
    assert not result.passed
    assert render(result)
    assert not to_json(result, loss_unit="nats/token")["passed"]
