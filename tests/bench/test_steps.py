"""Tests of `bench steps`: cases are runs that plans are made of, errors those of predictions."""

from __future__ import annotations

import pytest

from meshwright.cluster.presets import cluster_preset
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory import predict_process_memory
from meshwright.plan.rules import load
from meshwright.plan.time.step_time import predict_step
from meshwright_bench.steps.benchmark import case_figures, compare, percentile, summary_figures
from meshwright_bench.steps.layouts import Case, cases
from meshwright_bench.steps.measure import MeasuredRun, quick
from tests.bench.tiny import by_name

CPU = cluster_preset("CPU")


def plan_of(case):
    return make_plan(load(case.words[0], case.words[1:]))


def measured(case, *, slower=1.0, larger=1.0):
    """A run of a case that takes `slower` times its prediction."""
    plan = plan_of(case)
    us = predict_step(plan, CPU).total * slower
    return [MeasuredRun((us / 1e6,) * 4, round(predict_process_memory(plan) * larger))]


def test_cases_have_names_of_their_own_and_cover_what_a_layout_may_be():
    found = list(cases())
    assert len(found) >= 24 and len({case.name for case in found}) == len(found)
    plans = [load(case.words[0], case.words[1:]) for case in found if case.model != "qwen3"]
    assert {config.mesh.axes().num_ranks() for config in plans} == {1, 2, 4}
    assert len({config.pipeline.schedule for config in plans if config.mesh.pp > 1}) >= 4
    for axis in ("dp_shard", "dp_replicate", "tp", "pp", "cp", "ep"):
        assert any(getattr(config.mesh, axis) > 1 for config in plans)
    assert any(config.train.compile for config in plans)
    assert {"full", "selective"} <= {str(config.recompute.policy) for config in plans}


def test_errors_are_those_of_predictions_and_their_ranges_hold_the_interval():
    case = Case("llama-tiny", ("mesh.dp_shard=2",))
    compared, unpriced = compare(CPU, {case: plan_of(case)}, {case: measured(case, slower=1.25, larger=0.8)})
    figures = by_name(case_figures(compared, unpriced))
    error = figures[f"{case.name}.error"]
    assert error.value == pytest.approx(-20) and error.spread[0] < error.value < error.spread[1]
    assert figures[f"{case.name}.memory_error"].value == pytest.approx(25, rel=1e-3)
    assert by_name(summary_figures(compared))["error.median"].is_met is False


def test_the_least_of_the_rounds_counts():
    case = Case("llama-tiny", ())
    runs = measured(case, slower=3.0) + measured(case)
    compared, _ = compare(CPU, {case: plan_of(case)}, {case: runs})
    assert compared[0].error == pytest.approx(0, abs=1e-6)


def test_a_first_choice_that_is_slow_is_ranked_so():
    layouts = [Case("llama-tiny", words) for words in ((), ("mesh.dp_shard=2",), ("mesh.tp=2",))]
    plans = {case: plan_of(case) for case in layouts}
    best = min(layouts, key=lambda case: predict_step(plans[case], CPU).total)
    runs = {case: measured(case, slower=9.0 if case is best else 1.0) for case in layouts}
    figures = by_name(summary_figures(compare(CPU, plans, runs)[0]))
    assert figures["llama-tiny.rank_of_first"].value == 3
    assert figures["llama-tiny.first_slower"].is_met is False


def test_quantiles():
    assert quick([4.0, 1.0, 2.0, 3.0]) == 2.0
    assert [percentile(list(map(float, range(10))), share) for share in (0.5, 0.9, 1.0)] == [5.0, 9.0, 9.0]
