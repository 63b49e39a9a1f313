"""Counts from tables are those of the lists of pieces, and no method receives less than the bound."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cluster.presets import cluster_preset
from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout
from meshwright.mesh.shard_intervals import Reduction
from meshwright.reshard import Topology, plan
from meshwright.reshard.planner.intermediate_layouts import Staging, kind_of
from meshwright.reshard.planner.steps import LOCAL, Step, StepKind
from meshwright.reshard.planner.volumes import (
    ExchangeVolume,
    can_commute,
    exchange_volume,
    is_permutation,
    lower_bound,
    numels,
)
from meshwright.reshard.run.shard_exchange import messages_received, messages_sent
from meshwright_bench.reshard.random_layouts import sample_layout
from tests.reshard.by_hand import staging_elements

MESHES = [(2,), (3,), (2, 3), (4, 2), (3, 1, 2), (2, 2, 2)]
SIZES = [0, 1, 4, 7, 12, 13]


@st.composite
def ends(draw: st.DrawFn) -> tuple[Layout, Layout]:
    """Any two layouts, the second without partial values."""
    rng, axis_sizes = draw(st.randoms(use_true_random=False)), draw(st.sampled_from(MESHES))
    shape = draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=2))
    src, dst = (sample_layout(rng, axis_sizes, shape) for _ in range(2))
    return src, dst.with_partial(range(len(axis_sizes)), None)


def step_of(src: Layout, dst: Layout, found: ExchangeVolume) -> Step:
    return Step(StepKind.REDUCE_SCATTER if found.reduced else StepKind.ALL_TO_ALL, found.axes, src, dst, 0, 0, 0.0, 0)


def by_rank(table: np.ndarray, layout: Layout) -> list[int]:
    return np.broadcast_to(table, layout.axis_sizes).reshape(-1).tolist()


@settings(max_examples=40)
@given(ends())
def test_counts_are_those_of_the_pieces(pair: tuple[Layout, Layout]) -> None:
    src, dst = pair
    found = exchange_volume(src, dst)
    step = step_of(src, dst, found)
    assert by_rank(found.before, src) == src.local_numels().tolist()
    assert by_rank(found.after, src) == dst.local_numels().tolist()
    copies = math.prod(src.axis_sizes[axis] for axis in src.partial_axes())
    for rank in range(src.num_ranks()):
        arrived = messages_received(step, rank)
        assert sum(piece.numel() for piece in arrived) == copies * dst.local_numels()[rank], "axes are too few"
        away = sum(piece.numel() for piece in arrived if piece.sender != rank)
        assert by_rank(found.received, src)[rank] == away
        assert by_rank(found.sent, src)[rank] == sum(p.numel() for p in messages_sent(step, rank) if p.receiver != rank)


@settings(max_examples=40)
@given(ends())
def test_no_axis_takes_part_without_need(pair: tuple[Layout, Layout]) -> None:
    src, dst = pair
    found = exchange_volume(src, dst)
    if int(found.after.min()) == 0:
        return
    for axis in set(found.axes) - set(found.reduced):
        fewer = tuple(other for other in found.axes if other != axis)
        step = Step(StepKind.REDUCE_SCATTER if found.reduced else StepKind.ALL_TO_ALL, fewer, src, dst, 0, 0, 0.0, 0)
        whole = [sum(p.numel() for p in messages_received(step, rank)) for rank in range(src.num_ranks())]
        copies = math.prod(src.axis_sizes[other] for other in found.reduced)
        assert whole != [copies * numel for numel in dst.local_numels()]


@settings(max_examples=40)
@given(ends(), st.sampled_from([1, 2, 3, 7]))
def test_staging_is_that_of_the_pieces(pair: tuple[Layout, Layout], rounds: int) -> None:
    src, dst = pair
    found = exchange_volume(src, dst)
    kind = kind_of(src, dst, found)
    assert kind is not None
    if kind in LOCAL:
        return
    step = Step(kind, found.axes, src, dst, 0, 0, 0.0, 0)
    want = [staging_elements(step, rank, rounds) for rank in range(src.num_ranks())]
    assert by_rank(Staging(src, dst, found, kind).in_rounds(rounds), src) == want


@settings(max_examples=40)
@given(ends(), st.integers(0, 60))
def test_the_fewest_rounds_that_fit(pair: tuple[Layout, Layout], limit: int) -> None:
    src, dst = pair
    found = exchange_volume(src, dst)
    kind = kind_of(src, dst, found)
    if kind in LOCAL or kind is None:
        return
    held, staging = found.after, Staging(src, dst, found, kind)
    fewest = staging.fewest_rounds(held, limit)
    most = {rounds: int((held + staging.in_rounds(rounds)).max()) for rounds in (1, *range(2, 60), 256)}
    assert fewest == next((rounds for rounds, live in most.items() if live <= limit), 256)


@settings(max_examples=40)
@given(ends())
def test_a_permutation_is_one_piece_to_one_rank(pair: tuple[Layout, Layout]) -> None:
    src, dst = pair
    found = exchange_volume(src, dst)
    if found.reduced or not found.axes or int(found.before.min()) == 0 or int(found.after.min()) == 0:
        return
    step = step_of(src, dst, found)
    one = all(
        len(pieces) == 1 and pieces[0].numel() == src.local_numels()[rank]
        for rank in range(src.num_ranks())
        for pieces in [messages_sent(step, rank)]
    )
    arrives = all(len(messages_received(step, rank)) == 1 for rank in range(src.num_ranks()))
    assert is_permutation(src, dst, found.axes) == (one and arrives)


@pytest.mark.parametrize(
    ("mesh", "shape", "src", "dst", "elements"),
    [
        ((2,), (8,), "S0", "R", 4),
        ((2,), (8,), "R", "S0", 0),
        ((4,), (8,), "P", "S0", 6),  # 3 transfers of each of 8 elements, over 4 ranks
        ((4,), (8,), "P", "R", 12),  # and 3 more to have copies
        ((2, 2), (8,), "P S0", "P S0", 0),
        ((2, 2), (8,), "P S0", "P R", 4),
        ((2,), (8,), "R", "P", 0),
        ((2, 4), (8,), "P P", "P R", 9),  # twice 3 transfers, and 3 more if all is in one of the two sums
        ((2, 2), (8,), "S0 P", "P R", 4),  # someone on axis 0 must have the sums: 8 × 2 copies … over 4 ranks
        ((2,), (7,), "S0", "R", 4),  # uneven: 4 and 3
    ],
)
def test_the_bound(mesh: tuple[int, ...], shape: tuple[int, ...], src: str, dst: str, elements: int) -> None:
    assert lower_bound(Layout.parse(src, mesh, shape), Layout.parse(dst, mesh, shape)) == elements


def test_which_reductions_commute() -> None:
    assert can_commute(Reduction.SUM, Reduction.AVG) and can_commute(Reduction.MAX, Reduction.MAX)
    assert not can_commute(Reduction.SUM, Reduction.MAX) and not can_commute(Reduction.AVG, Reduction.PRODUCT)


def test_a_thousand_ranks_take_no_lists_of_pieces() -> None:
    rng = random.Random(0)
    src, dst = (sample_layout(rng, (4, 8, 4, 8), (4096, 8192)) for _ in range(2))
    assert int(np.broadcast_to(numels(src), src.axis_sizes).sum()) == int(src.local_numels().sum())
    assert exchange_volume(src, dst).after.size <= 1024


H100 = cluster_preset("H100")


def test_axes_fill_nodes_from_the_last_one_on() -> None:
    inside, between = H100.inside_node, H100.between_nodes
    assert Topology.of(H100, (4, 8)).links == (between, inside)
    assert Topology.of(H100, (4, 2, 4)).links == (between, inside, inside)
    assert Topology.of(H100, (2, 4, 4)).links == (between, between, inside)
    assert Topology.uniform(3).links == (inside,) * 3


def test_a_merged_group_costs_at_its_slowest_axis() -> None:
    topology = Topology.of(H100, (4, 8))
    for axes, link in (((0,), H100.between_nodes), ((1,), H100.inside_node), ((0, 1), H100.between_nodes)):
        assert topology.time_us(axes, 0) == link.latency_us
        assert topology.time_us(axes, 1e6, rounds=3) == pytest.approx(
            3 * link.latency_us + 1e12 / link.bandwidth_bytes_per_s
        )
    assert topology.time_us((), 1e9) == 0


def test_slow_links_change_the_plan() -> None:
    """Gathered over the slow axis first, while tensors are small."""
    src, dst = (Layout.parse(text, (4, 8), (8192, 8192)) for text in ("S0 S0", "R R"))
    assert len(plan(src, dst).steps) == 1
    slow = plan(src, dst, topology=Topology.of(H100, (4, 8)))
    assert [step.axes for step in slow.steps] == [(0,), (1,)]
    assert slow.steps[0].bytes_received < slow.steps[1].bytes_received


def test_one_link_for_each_axis() -> None:
    layout = Layout.parse("S0 R", (2, 2), (4,))
    with pytest.raises(LayoutError, match="3 links for a mesh of 2 axes") as error:
        plan(layout, layout, topology=Topology.uniform(3))
    assert "[2, 2]" in error.value.fix
