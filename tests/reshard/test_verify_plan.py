"""`verify` accepts plans that are right, the planner's all among them, and names what is wrong with every other."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import LayoutError
from meshwright.reshard import plan
from meshwright.reshard.planner.steps import ReshardPlan
from meshwright.reshard.run.shard_exchange import messages_received
from meshwright.reshard.verify_plan import check_values, count_exchange, verify
from tests.reshard.by_hand import plan_of
from tests.reshard.plan_faults import EXCHANGE, FAULTS, GATHER_SLICE_SWAP, MADE, MAKE, MIXED, REDUCE, ROUNDS
from tests.reshard.test_plan import small_pairs

RIGHT = [
    GATHER_SLICE_SWAP, EXCHANGE, MIXED, REDUCE, MAKE, ROUNDS,
    plan_of((2, 2), (8, 8), "S0 R"),
    plan_of((2, 3), (6, 6), "P P", ("all-reduce", "1", "P R")),
    plan_of((4,), (3, 5), "S0", ("all-gather", "0", "R")),
    plan_of((2, 3), (7,), "SS0/2 S0", ("all-to-all", "0 1", "S0@1 S0@0"), dtype="fp32"),
    plan_of((2, 2), (4, 4), "R R", ("partition", "", "P P"), dtype="int8"),
    plan_of((2, 2), (0, 4), "R S1", ("all-gather", "1", "R R")),
    plan_of((4,), (1,), "S0", ("all-gather", "0", "R")),
    plan_of((2,), (), "P", ("all-reduce", "0", "R"), dtype="fp64"),
]  # fmt: skip


@pytest.mark.parametrize("right", RIGHT, ids=lambda one: f"{one.src} → {one.dst}")
def test_right_plans_are_accepted(right):
    verify(right)


@cache
def large():
    """A plan for a thousand ranks."""
    return plan_of((32, 32), (2048, 2048), "S0 S1", ("all-to-all", "0 1", "S1 S0"), bound=8192)


@pytest.mark.slow
def test_a_right_plan_of_a_thousand_ranks_is_accepted():
    verify(large())


@pytest.mark.parametrize("fault", FAULTS, ids=lambda one: one.name)
def test_faults_are_caught_by_name(fault):
    check(fault.plan, fault.says)


@pytest.mark.parametrize(("name", "made", "says"), MADE, ids=[name for name, _, _ in MADE])
def test_plans_that_are_made_wrong_are_caught_by_name(name, made, says):
    check(made(), says)


def check(wrong: ReshardPlan, says: str) -> None:
    with pytest.raises(LayoutError) as caught:
        verify(wrong)
    error = caught.value
    assert says in str(error)
    assert error.where and error.rule and error.fix


def test_faults_have_their_own_messages():
    said = {}
    for name, wrong in [(fault.name, fault.plan) for fault in FAULTS] + [(name, made()) for name, made, _ in MADE]:
        with pytest.raises(LayoutError) as caught:
            verify(wrong)
        said[name] = caught.value.rule
    assert len(said) >= len(FAULTS) + len(MADE) - 1 and len(set(said.values())) >= 20


@pytest.mark.slow
def test_large_plans_are_judged_by_their_counts():
    """A thousand ranks, beyond what is carried out on paper."""
    right = large()
    check(replace(right, steps=(replace(right.steps[0], axes=(1,)),)), "needs 4096 elements for rank 1")
    check(replace(right, bytes_received=right.bytes_received - 2), "the plan's bytes_received")


def values_after(*plans: ReshardPlan) -> list[str]:
    """What the paper alone says of plans that the other checks would refuse."""
    found = []
    for one in plans:
        with pytest.raises(LayoutError) as caught:
            check_values(one)
        found.append(caught.value.what)
    return found


def test_values_on_paper_catch_what_layouts_hide():
    """Copies that count twice, shares that nobody keeps, a reduction that is left out, elements that are elsewhere."""
    doubled = plan_of((2, 2), (4, 4), "R S0", ("slice", "", "P S0"))
    lost = plan_of((2, 2), (4, 4), "S0 S0", ("partition", "", "P S0"))
    unreduced = plan_of((2, 2), (4, 4), "P S0", ("all-gather", "1", "R R"))
    elsewhere = plan_of((2, 2), (4, 4), "S0 S0", ("all-to-all", "0", "S1 S1"))
    said = values_after(doubled, lost, unreduced, elsewhere)
    assert "partial value 0 2 times" in said[0] and "partial value 0 0 times" in said[1]
    assert "finds box 0 of rank 0 1 times" in said[2] and "finds box" in said[3]


def test_small_plans_are_carried_out_on_paper(monkeypatch):
    asked = []
    module = sys.modules["meshwright.reshard.verify_plan"]  # the package's own `verify` is the function
    monkeypatch.setattr(module, "check_values", asked.append)
    verify(EXCHANGE)
    assert asked == [EXCHANGE]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(small_pairs(), st.sampled_from(["bf16", "fp32"]))
def test_many_plans_of_the_planner_are_accepted(pair, dtype):
    verify(plan(*pair, dtype=dtype))


def test_traffic_is_what_the_pieces_say():
    """The brute count of every pair of ranks, beside the pieces that are sent."""
    for step in (step for one in (GATHER_SLICE_SWAP, EXCHANGE, MIXED, REDUCE) for step in one.steps):
        matrix = np.zeros((step.src.num_ranks(),) * 2)
        for rank in range(step.src.num_ranks()):
            for piece in messages_received(step, rank):
                matrix[rank, piece.sender] += piece.numel() * (piece.sender != rank)
        assert (matrix == count_exchange(step).matrix()).all()
