"""Plans of one mesh axis a step: whole, correct, within memory, and no dearer than the way that is always open."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cluster.presets import cluster_preset
from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout
from meshwright.reshard import Topology, plan
from meshwright.reshard.draw_plan import explain_plan
from meshwright.reshard.planner.intermediate_layouts import Problem, goal_of, make_step, partition_stages
from meshwright.reshard.planner.plan import one_axis_forms, one_axis_path
from meshwright.reshard.planner.steps import ReshardPlan
from meshwright.reshard.verify_plan import verify
from meshwright_bench.reshard.random_layouts import sample_layout, sample_pairs

MESHES = [(2, 2), (2, 3), (3, 1, 2), (2, 2, 2), (2, 2, 1, 3)]


def check(found: ReshardPlan) -> None:
    assert all(len(step.axes) <= 1 for step in found.steps), explain_plan(found)
    verify(found)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    rng = draw(st.randoms(use_true_random=False))
    shape = draw(st.lists(st.sampled_from([0, 1, 4, 7, 12, 64]), min_size=1, max_size=3))
    axis_sizes = draw(st.sampled_from(MESHES))
    return sample_layout(rng, axis_sizes, shape), sample_layout(rng, axis_sizes, shape)


@settings(max_examples=30)
@given(pairs(), st.booleans())
def test_each_step_goes_along_one_axis(pair: tuple[Layout, Layout], uniform: bool) -> None:
    topology = None if uniform else Topology.of(cluster_preset("H100"), pair[0].axis_sizes)
    check(plan(*pair, topology=topology, one_axis=True))


@pytest.mark.slow
@settings(max_examples=20)
@given(pairs(), st.floats(0, 1))
def test_a_cap_is_kept_or_the_smallest_one_is_named(pair: tuple[Layout, Layout], share: float) -> None:
    free = plan(*pair, one_axis=True)
    ends = int((pair[0].local_numels() + pair[1].local_numels()).max()) * 2 if free.steps else free.peak_bytes
    cap = int(ends + share * (free.peak_bytes - ends))
    try:
        found = plan(*pair, memory_cap_bytes=cap, one_axis=True)
    except LayoutError as e:
        cap = int(e.fix.split("=")[1].split()[0])
        found = plan(*pair, memory_cap_bytes=cap, one_axis=True)
        with pytest.raises(LayoutError, match="no plan"):
            plan(*pair, memory_cap_bytes=cap - 1, one_axis=True)
    check(found)
    assert found.peak_bytes <= cap


@pytest.mark.parametrize("num_axes", [2, 3, 4])
def test_it_costs_no_more_than_the_way_that_is_always_open(num_axes: int) -> None:
    for src, dst in itertools.islice(sample_pairs(num_axes, 7), 12):
        ends = src.canonical(), dst.canonical()
        problem = Problem(*ends, 2, Topology.uniform(num_axes), one_axis=True)
        goal, at, time_us = goal_of(*ends), ends[0], 0.0
        for to in [*one_axis_path(ends[0], goal), *partition_stages(goal, ends[1])]:
            if to != at:
                step = make_step(problem, at, to)
                assert step is not None, f"{at} → {to} is not a step of one axis"
                time_us, at = time_us + step.time_us, to
        assert at == ends[1]
        assert plan(src, dst, one_axis=True).time_us <= time_us + 0.001


@pytest.mark.parametrize(
    ("src", "dst", "most"),
    [
        ("S0 S1", "S1 S0", 2),  # gathered along one axis, not both
        ("S0 S0", "S1 S1", 4 / 3),  # never gathered
        ("P P", "S0 S1", 1),
        ("R S0", "S0 R", 1),
    ],
)
def test_bytes_beside_those_of_merged_axes(src: str, dst: str, most: float) -> None:
    ends = [Layout.parse(text, (2, 2), (64, 64)) for text in (src, dst)]
    assert plan(*ends, one_axis=True).bytes_received <= most * plan(*ends).bytes_received


def test_without_a_choice_plans_are_those_of_merged_axes() -> None:
    """One axis alone has several ranks: nothing is forbidden, and nothing is dearer."""
    rng = random.Random(3)
    for axis_sizes in ((4,), (1, 3), (2, 1, 1)):
        for _ in range(10):
            src, dst = (sample_layout(rng, axis_sizes, (12, 7)) for _ in range(2))
            assert plan(src, dst, one_axis=True).time_us <= plan(src, dst).time_us


def test_forms_are_in_a_fixed_order_without_repetitions() -> None:
    src, dst = (Layout.parse(text, (2, 2, 2, 2, 2), (64, 64)) for text in ("S0 S1 S0 P R", "S1 S1 S0 R S0"))
    forms = one_axis_forms(src, dst)
    assert forms == one_axis_forms(src, dst) and len(set(forms)) == len(forms) < 64
