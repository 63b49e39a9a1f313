"""Programs of all ranks fit together, stage no more than planned, and put every element where it belongs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.mesh.layout import Layout
from meshwright.reshard.planner.steps import Step, StepKind
from meshwright.reshard.run.compile_step import compile_step
from meshwright.reshard.run.shard_exchange import (
    IndexRun,
    ShardMessage,
    contiguous_strides,
    split_flat,
)
from tests.reshard.by_hand import staging_elements
from tests.reshard.test_shard_exchange import exchanges, local, whole


def window(memory, size, at):
    """A strided view of a flat array, from the element where the window begins."""
    strides = tuple(stride * memory.itemsize for stride in at.strides)
    return np.lib.stride_tricks.as_strided(memory[at.offset :], size, strides)


def copied(copies, source, target):
    for copy in copies:
        window(target, copy.size, copy.target)[...] = window(source, copy.size, copy.source)


def run(step, slots, tensors):
    """All ranks' tensors after the step, moved in one process; the staging that each rank had."""
    ranks = range(len(tensors))
    programs = [compile_step(step, rank, slots[rank], contiguous_strides(tensors[rank].shape)) for rank in ranks]
    flat = [x.ravel() for x in tensors]
    results = [np.full(math.prod(p.after), -1) if p.changes else flat[r] for r, p in enumerate(programs)]
    staged = [0] * len(tensors)
    for at in range(max(len(p.rounds) for p in programs)):
        rounds = [p.rounds[at] for p in programs]
        buffers = []
        for rank, one in enumerate(rounds):
            packed = np.full(one.num_received if one.gathers else one.num_sent, -1)
            copied(one.pack, flat[rank], packed)
            if one.send_from is not None and one.gathers:
                place = slots[rank].index(rank) * one.receive[0]
                packed[place : place + one.num_sent] = flat[rank]
            elif one.send_from is not None:
                packed = flat[rank][one.send_from : one.send_from + one.num_sent]
            buffers.append(packed)
            held = (packed.size if one.send_from is None else 0) + (one.num_received if one.receive_at is None else 0)
            held = (0 if one.receive_at is not None else packed.size) if one.gathers else held
            staged[rank] = max(staged[rank], held)
            assert programs[rank].staging_elements >= held or len(slots[rank]) == 1
        for rank, one in enumerate(rounds):
            got = moved(rank, one, rounds, buffers, slots)
            if one.receive_at is not None:
                results[rank][one.receive_at : one.receive_at + got.size] = got
            copied(one.unpack, got, results[rank])
            copied(one.own, flat[rank], results[rank])
            for fold in one.reductions:
                copies = [window(got if r else flat[rank], fold.size, w) for r, w in fold.copies]
                window(results[rank], fold.size, fold.target)[...] = sum(copies)
    return [x.reshape(p.after) for x, p in zip(results, programs, strict=True)], staged


def moved(rank, one, rounds, buffers, slots):
    """What the collective brings to a rank."""
    mine = slots[rank].index(rank)
    parts = []
    for slot, other in enumerate(slots[rank]):
        if other < 0:
            assert one.receive[slot] == 0
            continue
        if one.gathers:
            assert rounds[other].receive == one.receive
            place = slots[other].index(other) * one.receive[0]
            parts.append(buffers[other][place : place + one.receive[0]])
        else:
            send = rounds[other].send
            where = slots[other].index(rank)
            assert send[where] == one.receive[slot], (other, rank, mine)
            start = sum(send[:where])
            parts.append(buffers[other][start : start + send[where]])
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def meetings(step, in_world):
    """The slots of each rank: those of its own group, or of the group of all ranks."""
    layout, found = step.src, []
    for rank in range(layout.num_ranks()):
        place = layout.coordinate(rank)
        same = [
            other for other in range(layout.num_ranks())
            if all(a == b for axis, (a, b) in enumerate(zip(layout.coordinate(other), place, strict=True))
                   if axis not in step.axes)
        ]  # fmt: skip
        found.append(tuple(r if r in same else -1 for r in range(layout.num_ranks())) if in_world else tuple(same))
    return found


@given(exchanges(), st.integers(1, 3), st.booleans())
def test_programs_of_all_ranks_make_the_new_layout(step, rounds, in_world):
    step = Step(step.kind, step.axes, step.src, step.dst, 0, 0, 0.0, 0, rounds)
    check(step, in_world)


def check(step, in_world):
    ranks = range(step.src.num_ranks())
    found, staged = run(step, meetings(step, in_world), [local(step.src, rank) for rank in ranks])
    copies = math.prod(step.src.axis_sizes[axis] for axis in step.src.partial_axes())
    for rank in ranks:
        assert (found[rank] == copies * local(step.dst, rank)).all()
        assert staged[rank] <= staging_elements(step, rank, step.rounds)


@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize(
    ("source", "target", "axes", "shape"),
    [("S0 R", "R R", (0,), (7, 3)), ("S0 S0", "R R", (0, 1), (8, 3)), ("S0 S1", "R R", (0, 1), (7, 5)),
     ("R SS0/3", "R R", (1,), (13, 2)), ("S1 S0", "R S0", (0,), (6, 4, 5)), ("S1 S0", "R S0", (0,), (6, 1))],
)  # fmt: skip
def test_gathers_in_rounds_and_without_a_group_of_their_own(source, target, axes, shape, rounds):
    src, dst = (Layout.parse(text, (2, 2), shape) for text in (source, target))
    step = Step(StepKind.ALL_GATHER, axes, src, dst, 0, 0, 0.0, 0, rounds)
    ranks = range(4)
    for in_world in (False, True):
        found, staged = run(step, meetings(step, in_world), [local(src, rank) for rank in ranks])
        assert all((found[rank] == local(dst, rank)).all() for rank in ranks)
        slack = 4 if in_world else 0
        assert all(staged[rank] <= staging_elements(step, rank, rounds) + slack for rank in ranks)


@pytest.mark.parametrize("rounds", [1, 3])
def test_an_all_reduce_gathers_copies(rounds):
    src, dst = Layout.parse("P S0", (3, 2), (5, 4)), Layout.parse("R S0", (3, 2), (5, 4))
    check(Step(StepKind.ALL_REDUCE, (0,), src, dst, 0, 0, 0.0, 0, rounds), in_world=False)


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_parts_of_a_packed_piece_follow_each_other(shape, data):
    piece = ShardMessage(0, 0, 0, tuple((IndexRun(0, 0, size),) for size in shape))
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total + 2))
    parts = split_flat(piece, start, stop)
    picked = [whole(shape)[tuple(slice(r.source, r.source + r.length) for (r,) in part.runs)].ravel() for part in parts]
    assert np.concatenate([np.zeros(0, np.int64), *picked]).tolist() == list(range(start, min(stop, total)))


def test_nothing_is_packed_where_pieces_lie_in_order():
    def program(source, target, shape, rank):
        src, dst = (Layout.parse(text, (4,), shape) for text in (source, target))
        step = Step(StepKind.ALL_TO_ALL, (0,), src, dst, 0, 0, 0.0, 0)
        (one,) = compile_step(step, rank, (0, 1, 2, 3), contiguous_strides(src.local_shape(rank))).rounds
        return one

    rows, columns = program("S1", "S0", (8, 8), 1), program("S0", "S1", (8, 8), 1)
    assert (rows.send_from, rows.receive_at, len(rows.unpack)) == (0, None, 1)
    assert (columns.send_from, columns.receive_at, len(columns.pack)) == (None, 0, 1)
