"""The screen and the JSON: valid, complete, grouped by cause, never longer than a screen."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from meshwright.mesh.axes import Axes
from meshwright.prove.compare.conclude import compare
from meshwright.prove.compare.result import Diagnosis, FaultKind, ParameterResult, ProofResult, TensorResult
from meshwright.prove.compare.tensor_shards import Deviation
from meshwright.prove.report import MAX_LINES, WIDTH, render, to_json
from tests.prove.synthetic import SHAPES, make_layout, make_reference, scale

AXES = Axes(dp_replicate=2, dp_shard=2)
MATRIX = "blocks.0.attn.q.weight"


def sides():
    reference = make_reference(4, 1)
    return reference, make_layout(reference, AXES)


def entry(result, name):
    return next(one for one in to_json(result, loss_unit="nats/token")["parameters"] if one["name"] == name)


def test_a_pass():
    reference, layout = sides()
    result = compare(layout, reference)
    lines, report = render(result), to_json(result, loss_unit="nats/token")
    assert lines[-2:] == ["loss 3 of 3 steps ✓ · gradients 13 of 13 ≤ 1e-12 ✓ · norm ✓ ·",
                          "  parameters after 3 steps ✓ · samples ✓"]  # fmt: skip
    assert lines[0].startswith("largest relative error: gradient 0.0e+00")
    assert [one["verdict"] for one in report["losses_nats_per_token"]] == ["ok"] * 3
    assert report["passed"] is True and report["grad_norm"]["verdict"] == "ok" and report["causes"] == []
    assert all(report["checks"].values()) and report["axes"]["dp_replicate"] == 2
    for one in report["parameters"]:
        assert (one["verdict"], one["cause"], one["max_abs_error"], one["relative_error"]) == ("ok", "", 0.0, 0.0)
    assert report["tolerance"] == {"step_1": 1e-12, "later": 1e-9}


def test_one_cause_of_all_parameters_is_told_once():
    reference, layout = sides()
    scale(layout.gradients, list(SHAPES), 4.0)
    result = compare(layout, reference)
    lines = render(result)
    assert lines[0] == "✗ all 13 gradients   4.000 × the reference on every rank"
    assert lines[1] == "  cause   summed over dp_replicate × dp_shard (4 ranks) instead of averaged"
    assert sum(line.startswith("✗") for line in lines) == 1
    report = to_json(result, loss_unit="nats/token")
    assert all("summed over dp_replicate × dp_shard (4 ranks)" in one["cause"] for one in report["parameters"])
    (cause,) = report["causes"]
    assert len(cause["members"]) == 13
    assert cause["kind"] == "scaled"


def test_a_few_parameters_are_named_with_how_many_there_are():
    reference, layout = sides()
    names = list(SHAPES)[2:6]
    scale(layout.gradients, names, 4.0)
    first = render(compare(layout, reference))[0]
    assert "and 2 more (4 of 13 gradients)" in first
    assert sum(name in first for name in names) == 2


def test_the_error_of_an_entry_is_of_what_went_wrong_first():
    reference, layout = sides()
    layout.parameters[MATRIX][0].value[0, 0] += 0.5
    one = entry(compare(layout, reference), MATRIX)
    assert (one["about"], one["max_abs_error"]) == ("after_steps", pytest.approx(0.5))
    assert one["gradient"]["verdict"] == "ok"
    assert one["after_steps"]["worst"]["rank"] == 0
    assert one["after_steps"]["worst"]["index"] == [0, 0]
    layout.gradients[MATRIX][0].value[1, 1] += 0.25
    one = entry(compare(layout, reference), MATRIX)
    assert (one["about"], one["max_abs_error"]) == ("gradient", pytest.approx(0.25))
    assert one["relative_error"] == pytest.approx(0.25 / float(reference.gradients[MATRIX].abs().max()))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_json_has_no_token_that_is_not_json(value):
    reference, layout = sides()
    layout.gradients[MATRIX][0].value[0, 0] = value
    layout.parameters[MATRIX][0].value[0, 0] = value
    layout.losses[1][0] = value
    layout.grad_norms[2][1] = value
    result = compare(layout, reference)
    report = json.loads(json.dumps(to_json(result, loss_unit="nats/token"), allow_nan=False))
    assert report["passed"] is False
    one = next(one for one in report["parameters"] if one["name"] == MATRIX)
    assert one["max_abs_error"] is None
    assert "not finite" in one["cause"]
    assert report["losses_nats_per_token"][0]["layout"][1] is None
    assert report["losses_nats_per_token"][0]["verdict"] == "wrong"
    assert render(result)


def test_consequences_stay_off_the_screen_when_their_cause_is_known():
    reference, layout = sides()
    scale(layout.gradients, list(SHAPES), 4.0)
    for name in SHAPES:
        scale(layout.parameters, [name], 1.01)
    lines = render(compare(layout, reference))
    assert not any("follows" in line for line in lines)
    assert any("parameters after 3 steps 0 of 13 ✗" in line for line in lines)


def big_result(num_causes):
    """A result with 300 wrong parameters that have `num_causes` causes between them."""
    wrong = Deviation(1.0, 0.5, 3, (4, 5), 2.0, 1.0)

    def parameter(at):
        cause = Diagnosis(
            FaultKind.UNRECOGNISED, "not recognised", f"cause {at % num_causes} " + "long " * 40, "detail " * 30
        )
        tensor = TensorResult(wrong, 1e-12, False, diagnosis=cause)
        right = TensorResult(Deviation(0.0, 0.0), 1e-9, True)
        return ParameterResult(f"blocks.{at}.some.module.with.a.name.weight", (8, 8), tensor, right)

    reference, layout = sides()
    result = compare(layout, reference)
    return dataclasses.replace(result, parameters=tuple(parameter(at) for at in range(300)))


@pytest.mark.parametrize("num_causes", [1, 2, 7, 300])
def test_a_screen_is_never_more_than_a_screen(num_causes):
    result = big_result(num_causes)
    assert isinstance(result, ProofResult)
    lines = render(result)
    assert len(lines) <= MAX_LINES
    assert all(len(line) <= WIDTH for line in lines)
    assert "gradients 0 of 300" in " ".join(lines)
    if num_causes == 1:
        assert lines[0].startswith("✗ all 300 gradients")
    if num_causes == 300:
        assert any("more findings: see the JSON" in line for line in lines)
    assert len(to_json(result, loss_unit="nats/token")["causes"]) == num_causes


def test_a_layout_whose_copies_differ_by_rounding_says_so():
    reference, layout = sides()
    layout.gradients[MATRIX][2].value.mul_(1 + 1e-15)
    result = compare(layout, reference)
    assert result.passed
    assert any("equal only within rounding" in note for note in result.notes)
    one = entry(result, MATRIX)["gradient"]
    assert one["copies_bitwise_equal"] is False
    assert one["replicated_over"] == ["dp_replicate"]
    assert 0 < one["copy_difference"] < 1e-13


def test_several_findings_are_told_in_the_order_a_fault_travels():
    reference, layout = sides()
    layout.samples[1][0] = list(layout.samples[0][0])
    layout.initial[MATRIX][0].value.add_(1.0)
    scale(layout.gradients, ["norm.weight"], 2.0)
    layout.losses[0][0] = torch.tensor(1.5).item()
    marks = [line for line in render(compare(layout, reference)) if line.startswith("✗")]
    words = ["✗ samples", MATRIX, "norm.weight"]
    assert [next(word for word in words if word in mark) for mark in marks[:3]] == words
