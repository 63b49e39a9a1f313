"""Pieces make up every rank's new tensor, and both ends agree on them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from meshwright.mesh.layout import Layout
from meshwright.mesh.shard_intervals import Reduction
from meshwright.reshard.planner.steps import Step, StepKind
from meshwright.reshard.run.shard_exchange import (
    IndexRun,
    ShardMessage,
    messages_received,
    messages_sent,
    split_into_rounds,
)
from tests.reshard.by_hand import staging_elements


@st.composite
def exchanges(draw: st.DrawFn) -> Step:
    """One exchange over all axes between any two layouts, of partial values at times."""
    axis_sizes = draw(st.sampled_from([(4,), (2, 3), (3, 2), (2, 2, 2), (3, 1, 2)]))
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    words = ["R"] + [f"{cut.format(dim)}" for dim in range(len(shape)) for cut in ("S{}", "SS{}/2", "SS{}/3")]
    src, dst = (
        Layout.parse(" ".join(draw(st.sampled_from(words)) for _ in axis_sizes), axis_sizes, shape) for _ in range(2)
    )
    axes = src.replicated_axes()
    if draw(st.booleans()) and axes:
        src = src.with_partial(draw(st.lists(st.sampled_from(axes), min_size=1, unique=True)), Reduction.SUM)
    kind = StepKind.REDUCE_SCATTER if src.partial_axes() else StepKind.ALL_TO_ALL
    return Step(kind, tuple(range(len(axis_sizes))), src, dst, 0, 0, 0.0, 0)


def whole(shape: Sequence[int]) -> NDArray[np.int64]:
    return np.arange(math.prod(shape)).reshape(shape)


def local(layout: Layout, rank: int) -> NDArray[np.int64]:
    """What the rank holds of `whole`, from the layout's slices alone."""
    x = whole(layout.shape)
    for dim, slices in enumerate(layout.local_slices(rank)):
        empty = np.zeros(0, np.int64)
        x = x.take(np.concatenate([empty, *(np.arange(s.start, s.stop) for s in slices)]), axis=dim)
    return x


def index(runs: Sequence[Sequence[IndexRun]], end: str) -> tuple[NDArray[np.int64], ...]:
    return np.ix_(*(np.concatenate([np.arange(at := getattr(r, end), at + r.length) for r in dim]) for dim in runs))


@settings(max_examples=60, deadline=None)
@given(exchanges(), st.integers(1, 4))
def test_every_copy_of_the_new_part_is_made_of_pieces(step: Step, rounds: int) -> None:
    copies = math.prod(step.src.axis_sizes[axis] for axis in step.src.partial_axes())
    for rank in range(step.src.num_ranks()):
        want = local(step.dst, rank)
        made = np.full((copies, *want.shape), -1)
        for piece in messages_received(step, rank):
            for part in split_into_rounds(piece, rounds):
                if part is not None:
                    values = local(step.src, part.sender)[index(part.runs, "source")]
                    made[part.copy][index(part.runs, "target")] = values
        assert (made == want).all()


@settings(max_examples=60, deadline=None)
@given(exchanges())
def test_senders_and_receivers_agree(step: Step) -> None:
    ranks = range(step.src.num_ranks())
    out = [piece for rank in ranks for piece in messages_sent(step, rank)]
    arrived = [piece for rank in ranks for piece in messages_received(step, rank)]
    assert len(set(out)) == len(out)
    assert sorted(out, key=str) == sorted(arrived, key=str)


@settings(max_examples=60, deadline=None)
@given(exchanges(), st.integers(2, 5))
def test_rounds_hold_less_and_lose_nothing(step: Step, rounds: int) -> None:
    for rank in range(step.src.num_ranks()):
        for piece in messages_received(step, rank):
            parts = split_into_rounds(piece, rounds)
            assert len(parts) == rounds
            assert sum(part.numel() for part in parts if part) == piece.numel()
        assert staging_elements(step, rank, rounds) <= staging_elements(step, rank)


def test_copies_come_from_the_same_place_on_their_axis() -> None:
    step = Step(
        StepKind.ALL_TO_ALL, (0, 1), Layout.parse("R S0", (2, 2), (4,)), Layout.parse("R R", (2, 2), (4,)), 0, 0, 0.0, 0
    )
    assert [(piece.sender, piece.receiver) for piece in messages_received(step, 3)] == [(2, 3), (3, 3)]


def test_an_all_gather_stages_the_largest_part_of_each() -> None:
    before, after = Layout.parse("S0", (3,), (7, 2)), Layout.parse("R", (3,), (7, 2))
    step = Step(StepKind.ALL_GATHER, (0,), before, after, 0, 0, 0.0, 0)
    assert staging_elements(step, 2) == 3 * 6
    assert staging_elements(step, 2, rounds=3) == 3 * 2


def test_a_scalar_is_one_piece() -> None:
    layout = Layout.parse("R", (2,), ())
    step = Step(StepKind.SLICE, (), layout, layout, 0, 0, 0.0, 0)
    assert messages_received(step, 1) == (ShardMessage(1, 1, 0, ()),) == messages_sent(step, 1)
    assert split_into_rounds(ShardMessage(1, 1, 0, ()), 2) == (ShardMessage(1, 1, 0, ()), None)
