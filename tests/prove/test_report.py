"""The screen and the JSON: valid, complete, grouped by cause, never longer than a screen."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from meshwright.errors import RunError
from meshwright.mesh.axes import Axes
from meshwright.prove.conclude import rounding_notes
from meshwright.prove.report import MAX_LINES, WIDTH, ended_to_json, render, render_ended, to_json
from meshwright.prove.result import Deviation, Diagnosis, FaultKind, Finding, ParameterResult, TensorResult
from tests.prove.synthetic import EVERY, MATRIX, Case, scale

HSDP, UNIT = Axes(dp_replicate=2, dp_shard=2), "nats/token"


def entry(result, name=MATRIX):
    return next(one for one in to_json(result, loss_unit=UNIT)["parameters"] if one["name"] == name)


def add(case, error, step, rank=0):
    """A rank's piece of a matrix is off by `error` after a step."""
    case.layout.after = lambda at, number, name, old, new: (
        new + error if (at, number, name) == (rank, step, MATRIX) else new
    )


def test_a_pass():
    result = Case(HSDP).proof()
    lines, report = render(result), to_json(result, loss_unit=UNIT)
    assert lines[-2:] == ["loss 3 of 3 steps ✓ · gradients 13 of 13 ≤ 1e-12 ✓ · norm ✓ ·",
        "  clipping and learning rate ✓ · parameters after each of 3 steps ✓ · samples ✓"]  # fmt: skip
    assert lines[0].startswith("largest relative error: gradient 0.0e+00") and "update" in " ".join(lines[:2])
    assert [one["verdict"] for one in report["losses_nats_per_token"]] == ["ok"] * 3
    assert report["passed"] is True and report["as_run"] is False and report["causes"] == []
    assert all(report["checks"].values()) and report["axes"]["dp_replicate"] == 2
    assert report["grad_norm"]["verdict"] == "ok" and [one["step"] for one in report["grad_norm"]["steps"]] == [1, 2, 3]
    for one in report["parameters"]:
        assert (one["verdict"], one["cause"], one["max_abs_error"], one["relative_error"]) == ("ok", "", 0.0, 0.0)
        assert one["gradient"]["tolerance"] == 1e-12 and one["initial"]["proves"] and one["update"]["verdict"] == "ok"


def test_one_cause_of_all_parameters_is_told_once():
    case = Case(HSDP)
    scale(case.layout.gradients, EVERY, 4.0)
    result = case.proof()
    lines, report = render(result), to_json(result, loss_unit=UNIT)
    assert lines[0] == "✗ all 13 gradients   4.000 × the reference on every rank"
    assert lines[1] == "  cause   summed over dp_replicate × dp_shard (4 ranks) instead of averaged"
    assert sum(line.startswith("✗") for line in lines) == 1
    assert all("summed over dp_replicate × dp_shard (4 ranks)" in one["cause"] for one in report["parameters"])
    (cause,) = report["causes"]
    assert (len(cause["members"]), cause["kind"], cause["about"], cause["step"]) == (13, "scaled", "gradient", 1)


@pytest.mark.parametrize(("step", "title"), [(1, "(4 of 13 gradients)"), (2, "(4 of 13 gradients of step 2)")])
def test_a_few_parameters_are_named_with_how_many_there_are(step, title):
    case, names = Case(HSDP), EVERY[2:6]
    scale(case.layout.by_step[step - 1], names, 4.0)
    first = " ".join(render(case.proof())[:2])
    assert f"and 2 more {title}" in " ".join(first.split())
    assert sum(name in first for name in names) == 2


def test_the_error_of_an_entry_is_of_what_went_wrong_first():
    case = Case(HSDP)
    add(case, 0.5, 2)
    result = case.proof()
    one = entry(result)
    assert (one["about"], one["max_abs_error"]) == ("update", pytest.approx(0.5))
    assert one["gradient"]["verdict"] == "ok" and one["update"]["step"] == 2
    assert one["update"]["worst"]["rank"] == 0 and f"{MATRIX} after step 2" in render(result)[0]
    case.layout.gradients[MATRIX][0].value[1, 1] += 0.25
    one = entry(case.proof())
    assert (one["about"], one["max_abs_error"]) == ("gradient", pytest.approx(0.25))
    assert one["relative_error"] == pytest.approx(0.25 / float(case.reference.gradients()[MATRIX].abs().max()))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_json_has_no_token_that_is_not_json(value):
    case = Case(HSDP)
    case.layout.gradients[MATRIX][0].value[0, 0] = value
    add(case, value, 3)
    case.layout.losses[1][0] = case.layout.norms[2, 2] = value
    result = case.proof()
    report = json.loads(json.dumps(to_json(result, loss_unit=UNIT), allow_nan=False))
    assert report["passed"] is False and render(result)
    one = next(one for one in report["parameters"] if one["name"] == MATRIX)
    assert one["max_abs_error"] is None and "not finite" in one["cause"]
    assert report["losses_nats_per_token"][0]["layout"][1] is None
    assert report["losses_nats_per_token"][0]["verdict"] == report["grad_norm"]["steps"][1]["verdict"] == "wrong"


def test_consequences_stay_off_the_screen_when_their_cause_is_known():
    case = Case(HSDP)
    case.layout.gradients[MATRIX][2].value.add_(1.0)  # so that its replicas are updated apart
    result = case.proof()
    assert any(one.is_consequence for one in result.findings)
    assert "follows" not in (text := " ".join(render(result))) and "12 of 13 ✗" in text


def big_result(num_causes):
    """A result with 300 wrong parameters that have `num_causes` causes between them."""
    right, names = TensorResult(Deviation(0.0, 0.0), 1e-9, True), [f"blocks.{at}.a.name.weight" for at in range(300)]
    words = ["not recognised", "cause {} " + "long " * 40, "detail " * 30]
    causes = [Diagnosis(FaultKind.UNRECOGNISED, *(one.format(at) for one in words)) for at in range(num_causes)]
    wrong = [TensorResult(Deviation(1.0, 0.5, 3, (4, 5), 2.0, 1.0), 1e-12, False, diagnosis=one) for one in causes]
    parameters = [ParameterResult(n, (8, 8), right, wrong[at % num_causes], right) for at, n in enumerate(names)]
    findings = [Finding("gradient", one, tuple(names[at::num_causes]), 300, 1) for at, one in enumerate(causes)]
    return dataclasses.replace(Case(HSDP).proof(), parameters=tuple(parameters), findings=tuple(findings))


@pytest.mark.parametrize("num_causes", [1, 2, 7, 300])
def test_a_screen_is_never_more_than_a_screen(num_causes):
    result = big_result(num_causes)
    lines = render(result)
    assert len(lines) <= MAX_LINES and all(len(line) <= WIDTH for line in lines)
    assert "gradients 0 of 300" in " ".join(lines)
    assert lines[0].startswith("✗ all 300 gradients") or num_causes > 1
    assert any("more findings: see the JSON" in line for line in lines) or num_causes < 300
    assert len(to_json(result, loss_unit=UNIT)["causes"]) == num_causes


def test_a_layout_whose_copies_differ_by_rounding_says_so():
    case = Case(HSDP)
    case.layout.gradients[MATRIX][2].value.mul_(1 + 1e-15)
    result = case.proof()
    (note,) = rounding_notes(result)
    assert result.passed and "are equal only within rounding" in note
    one = entry(result)["gradient"]
    assert one["copies_bitwise_equal"] is False and one["replicated_over"] == ["dp_replicate"]
    assert 0 < one["copy_difference"] < 1e-13


def test_several_findings_are_told_in_the_order_in_which_they_arise():
    """First by step, then by place."""
    case = Case(HSDP)
    add(case, 1.0, 1)
    case.layout.samples[1][0] = list(case.layout.samples[0][0])
    scale(case.layout.gradients, ["norm.weight"], 2.0)
    scale(case.layout.by_step[1], ["head.weight"], 2.0)
    for rank in range(4):
        case.layout.losses[rank][1] = 1.5
    abouts = [(one.step, one.about) for one in case.proof().findings if not one.is_consequence]
    assert abouts[0] == (1, "samples") and abouts == sorted(abouts, key=lambda one: one[0])


def test_an_error_that_ends_a_layout_is_a_finding():
    what = 'rank 1 failed in step 2, 1F0\nTraceback (most recent last):\n  File "own.py", line 3\nValueError: no rows'
    error = RunError(what, where="rank 1 of 2, step 2, host a\n       all ranks: rank 0: step 2")
    first, cause, where, ranks, *trace = render_ended(error)
    assert "rank 1 failed in step 2, 1F0" in first and cause.split(maxsplit=1) == ["cause", "ValueError: no rows"]
    assert where.split()[0] == "where" and ranks.strip() == "all ranks: rank 0: step 2"
    assert trace == what.splitlines()[1:]
    report = ended_to_json(error)
    assert not report["passed"] and report["causes"][0]["cause"] == what


def test_a_gradient_without_tolerance_is_shown_beside_others():
    """Of a gradient that is zero, rounding changes nothing; one that it changes altogether is not shown."""
    right = Case(HSDP).proof()
    replace = dataclasses.replace
    for limit in (0.0, math.inf):
        parameters = [replace(one, gradient=replace(one.gradient, tolerance=limit)) for one in right.parameters]
        lines = render(replace(right, as_run=True, precision="bfloat16", parameters=tuple(parameters)))
        shown = " ".join(lines[: next(at for at, line in enumerate(lines) if line.startswith("loss "))])
        assert shown.startswith("relative errors") and ("gradient" in shown) == (limit == 0.0)
