"""Closed forms of schedules against their tables, simulated."""

from __future__ import annotations

from functools import cache

import pytest

from meshwright.pipeline.generate import generate
from meshwright.pipeline.lower import LowerOptions, lower
from meshwright.pipeline.simulate import Costs, EdgeCosts, StageCosts, peak_bytes, simulate
from meshwright.plan.search import schedules
from meshwright.plan.search.schedules import SPLIT, Work, choices, held, span, spread, stages_of

FORWARD, BACKWARD, WEIGHT, EDGE = 100.0, 200.0, 90.0, 2.0
SIZES = ((4, 4), (4, 16), (8, 32))
CHOICES = [one for one in choices(4) if one[1] < 8]


@cache
def table(name, p, v, m):
    return lower(generate(name, num_stages=p, num_microbatches=m, num_chunks=v), LowerOptions())


def simulated(name, p, v, m):
    weight = WEIGHT if name in SPLIT else 0.0
    costs = [StageCosts(FORWARD / v, (BACKWARD - weight) / v, weight / v) for _ in range(p * v)]
    return simulate(table(name, p, v, m), Costs(costs, [EdgeCosts(EDGE, 1, 1e9)] * (p * v - 1))).makespan


def predicted(name, p, v, m):
    weight = WEIGHT if name in SPLIT else 0.0
    work = Work(FORWARD, BACKWARD - weight, weight)
    return schedules.span(name, p, v, m, slowest=work, every=p * work.total, edge=EDGE)


def off(name, v):
    """Return the largest relative error of the closed form of a schedule's time."""
    sizes = [(p, m) for p, m in SIZES if name != "dualpipe-v" or m >= 2 * p]
    return max(abs(predicted(name, p, v, m) / simulated(name, p, v, m) - 1) for p, m in sizes)


@pytest.mark.parametrize(("name", "v"), CHOICES)
def test_the_time_of_a_schedule(name, v):
    assert off(name, v) < 0.07


@pytest.mark.parametrize(("name", "v"), CHOICES)
def test_a_forgotten_bubble_is_found(name, v, monkeypatch):
    def without(name, p, v, m, *, slowest, every, edge):
        return m * slowest.total

    monkeypatch.setattr(schedules, "span", without)
    assert off(name, v) > 0.09


def held_at_most(name, p, v, m):
    """Return the micro-batches of all chunks that each rank holds, according to the table."""
    costs = Costs([StageCosts(activation_bytes=1000) for _ in range(p * v)])
    return [(one.activations + one.retained) / 1000 / v for one in peak_bytes(table(name, p, v, m), costs)]


@pytest.mark.parametrize(("name", "v"), CHOICES)
@pytest.mark.parametrize(("p", "m"), [(4, 16), (8, 32)])
def test_what_ranks_hold(name, v, p, m):
    exact = held_at_most(name, p, v, m)
    closed = [held(name, p, v, m, rank) for rank in range(p)]
    assert all(mine >= its for mine, its in zip(closed, exact, strict=True))
    assert max(closed) <= max(exact) * 1.34


@pytest.mark.parametrize("v", [2, 4])
def test_a_rank_holds_no_more_than_there_are(v):
    assert held("interleaved", 8, v, 3, 0) == 3


def test_ranks_hold_a_stage_of_each_chunk():
    assert stages_of("interleaved", 4, 2, 1) == (1, 5)
    assert stages_of("zb-v", 4, 2, 1) == (1, 6)


@pytest.mark.parametrize("rank", range(4))
def test_the_spread_of_what_is_held_adds_up(rank):
    total = held("interleaved", 4, 3, 16, rank) * 3
    assert sum(spread("interleaved", 4, 3, rank)) == total
    assert sum(spread("zb-v", 4, 2, rank)) == 2 * held("zb-v", 4, 2, 16, rank)


def test_one_rank_waits_for_none():
    work = Work(3.0, 4.0, 0.0)
    assert span("1f1b", 1, 1, 5, slowest=work, every=work.total, edge=9.0) == 35.0
