"""Lowering keeps the computations, uses few buffers, and frees everything once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.pipeline import Schedule, generate, lower, verify
from meshwright.pipeline.actions import COMPUTE, FREES, RECVS, SENDS, ActionKind
from meshwright.pipeline.generate import ScheduleKind
from meshwright.pipeline.lower import LowerOptions, forward_only, num_slots
from tests.pipeline.random_tables import random_table

K = ActionKind
random_tables = st.builds(random_table, st.randoms(use_true_random=False), splits=st.booleans(), overlaps=st.booleans())
all_options = st.builds(LowerOptions, release=st.booleans(), reduces=st.booleans(), keeps_unsharded=st.booleans())


def some_tables():
    for kind in ScheduleKind:
        for p, m in ((1, 3), (2, 4), (3, 7), (4, 8)):
            yield pytest.param(generate(kind, num_stages=p, num_microbatches=m), id=f"{kind.value}-{p}-{m}")


def names(table: Schedule, kinds) -> Counter[str]:
    return Counter(f"{part.stage}{part.kind.value}{part.microbatch}" for _, _, part in table.positions()
                   if part.kind in kinds)  # fmt: skip


def row(table: Schedule, rank: int) -> list[str]:
    return [str(action) for action in table.actions[rank]]


def assert_lowered_right(table: Schedule, options: LowerOptions) -> None:
    lowered = lower(table, options)
    verify(lowered)
    assert lowered.compute_only() == table
    assert lower(lowered, options) == lowered
    crossing = {stage for stage in range(table.num_stages) if table.is_transfer(stage)}
    pairs = [(stage, m) for stage in crossing for m in range(table.num_microbatches)]
    transfers = {f"{stage}SEND_F{m}" for stage, m in pairs} | {f"{stage + 1}SEND_B{m}" for stage, m in pairs}
    assert names(lowered, SENDS) == Counter(transfers)
    assert names(lowered, RECVS) == Counter(
        {f"{stage + 1}RECV_F{m}" for stage, m in pairs} | {f"{stage}RECV_B{m}" for stage, m in pairs}
    )
    freed = {f"{stage}{kind}{m}" for stage, m in pairs for kind in ("FREE_OUT", "FREE_GRAD")}
    freed |= {f"{stage + 1}{kind}{m}" for stage, m in pairs for kind in ("FREE_IN", "FREE_IN_GRAD")}
    assert names(lowered, FREES) == Counter(freed)


@pytest.mark.parametrize("release", [True, False])
@pytest.mark.parametrize("table", list(some_tables()))
def test_generated_tables(table, release):
    assert_lowered_right(table, LowerOptions(release=release))


@given(random_tables, all_options)
@settings(max_examples=100)
def test_any_table(table, options):
    assert_lowered_right(table, options)


@given(random_tables)
@settings(max_examples=50)
def test_released_things_go_at_their_last_use_and_others_stay_to_the_end(table):
    for rank in range(table.num_ranks):
        released = row(lower(table), rank)
        kept = row(lower(table, LowerOptions(release=False)), rank)
        first_free = next((i for i, name in enumerate(kept) if "FREE" in name), len(kept))
        assert all("FREE" in name for name in kept[first_free:])
        for position, name in enumerate(released):
            if "FREE_IN_GRAD" in name:
                stage, m = name.split("FREE_IN_GRAD")
                assert f"{stage}SEND_B{m}" in released[:position]
            elif "FREE_IN" in name or "FREE_GRAD" in name:
                before = position - 1
                while "FREE" in released[before]:
                    before -= 1
                stage, m = name.replace("FREE_IN", " ").replace("FREE_GRAD", " ").split()
                last = [f"{stage}B{m}", f"{stage}W{m}"]
                assert set(released[before].split("+")) & set(last), (name, released[before])


@given(random_tables)
@settings(max_examples=50)
def test_without_release_each_receive_has_a_slot_of_its_own(table):
    lowered = lower(table, LowerOptions(release=False))
    for rank in range(table.num_ranks):
        used = Counter((part.kind, part.slot) for r, _, part in lowered.positions() if r == rank and part.kind in RECVS)
        assert all(count == 1 for count in used.values())
        assert num_slots(lowered, rank) == {kind: sum(k is kind for k, _ in used) for kind in sorted(RECVS, key=str)}


def assert_few_slots(p: int, m: int) -> None:
    lowered = lower(generate("1f1b", num_stages=p, num_microbatches=m))
    for rank in range(p):
        slots = num_slots(lowered, rank)
        assert slots[K.RECV_FORWARD] <= p - rank and slots[K.RECV_BACKWARD] <= 1
        assert sum(slots.values()) <= p - rank + 1


@pytest.mark.parametrize("p", range(1, 9))
def test_1f1b_needs_few_slots_however_many_micro_batches(p):
    for m in {*range(1, 2 * p + 3), 33, 64}:
        assert_few_slots(p, m)


@pytest.mark.parametrize("keeps_unsharded", [True, False])
@pytest.mark.parametrize("table", list(some_tables()))
def test_sharding_stands_around_each_stages_work(table, keeps_unsharded):
    lowered = lower(table, LowerOptions(reduces=True, keeps_unsharded=keeps_unsharded))
    verify(lowered)
    for rank in range(table.num_ranks):
        for stage in table.stages_of(rank):
            kinds = [part.kind for action in lowered.actions[rank] for part in action.parts() if part.stage == stage]
            kinds = [kind for kind in kinds if kind in COMPUTE or kind in (K.UNSHARD, K.RESHARD, K.REDUCE)]
            computing = len(kinds) - (3 if keeps_unsharded else 1)
            assert all(kind in COMPUTE for kind in kinds[keeps_unsharded : computing + keeps_unsharded])
            assert kinds[computing + keeps_unsharded :] == ([K.REDUCE, K.RESHARD] if keeps_unsharded else [K.REDUCE])
            assert not keeps_unsharded or kinds[0] is K.UNSHARD


def test_nothing_is_reduced_or_gathered_without_being_asked_for():
    lowered = lower(generate("1f1b", num_stages=2, num_microbatches=2), LowerOptions(keeps_unsharded=True))
    assert not names(lowered, {K.UNSHARD, K.RESHARD, K.REDUCE, K.SYNC_SHARED})


@pytest.mark.parametrize("kind", list(ScheduleKind))
def test_shared_gradients_sync_last_in_one_order_on_all_ranks(kind):
    table = generate(kind, num_stages=3, num_microbatches=6)
    last = table.num_stages - 1
    lowered = lower(table, LowerOptions(reduces=True, shared=((0, last), (0, 1))))
    verify(lowered)
    on_ranks = {table.stage_ranks[0], table.stage_ranks[last]}
    for rank in range(3):
        syncs = [name for name in row(lowered, rank) if "SYNC_SHARED" in name]
        groups = [min(s for s in group if table.stage_ranks[s] == rank) for group in ((0, last), (0, 1))
                  if rank in {table.stage_ranks[s] for s in group}]  # fmt: skip
        assert syncs == [f"{stage}SYNC_SHARED" for stage in groups]
        assert row(lowered, rank)[len(row(lowered, rank)) - len(syncs) :] == syncs
        assert rank not in on_ranks or syncs


def test_a_table_by_hand():
    lowered = lower(generate("1f1b", num_stages=2, num_microbatches=2), LowerOptions(reduces=True, shared=((0, 1),)))
    assert row(lowered, 0) == [
        "0F0", "0SEND_F0", "0F1", "0FREE_OUT0", "0SEND_F1", "0RECV_B0@0", "0B0", "0FREE_GRAD0", "0RECV_B1@0", "0B1",
        "0FREE_GRAD1", "0FREE_OUT1", "0REDUCE", "0SYNC_SHARED",
    ]  # fmt: skip
    assert [name.split("@")[0] for name in row(lowered, 1)] == [
        "1RECV_F0", "1F0", "1B0", "1FREE_IN0", "1RECV_F1", "1SEND_B0", "1F1", "1B1", "1FREE_IN1", "1SEND_B1",
        "1FREE_IN_GRAD0", "1REDUCE", "1FREE_IN_GRAD1", "1SYNC_SHARED",
    ]  # fmt: skip


def test_one_rank_is_left_as_it_is():
    table = generate("interleaved", num_stages=1, num_microbatches=3, num_chunks=2)
    assert lower(table) == table


@pytest.mark.parametrize("stage_ranks", [(0,), (0, 1), (0, 1, 1, 0), (0, 1, 0, 1)])
def test_an_evaluation_lowers_too(stage_ranks):
    gathered = lower(forward_only(3, stage_ranks), LowerOptions(reduces=True, keeps_unsharded=True))
    verify(gathered, trains=False)
    assert not names(gathered, {K.REDUCE})
    lowered = lower(forward_only(3, stage_ranks))
    verify(lowered, trains=False)
    for rank in range(max(stage_ranks) + 1):
        assert num_slots(lowered, rank)[K.RECV_FORWARD] <= 2 * stage_ranks.count(rank)
