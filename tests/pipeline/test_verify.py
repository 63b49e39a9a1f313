"""`verify` accepts every table that is generated and lowered, and reports the fault in every broken one."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import ScheduleError
from meshwright.pipeline import Costs, Schedule, generate, lower, simulate, verify
from meshwright.pipeline.actions import Action, ActionKind
from meshwright.pipeline.generate import ScheduleKind
from meshwright.pipeline.lower import LowerOptions, forward_only
from tests.pipeline.paper_executor import Wrong, run_on_paper
from tests.pipeline.random_tables import random_table
from tests.pipeline.table_faults import (
    EVERYTHING,
    FAULTS,
    MEMORY_FAULTS,
    STAGE_FAULTS,
    TORCH_1F1B,
    TRANSFER_FAULTS,
    Edit,
    base,
    both_send_first,
    lowered,
    sharded,
)  # fmt: skip

OPTIONS = [
    LowerOptions(),
    LowerOptions(release=False),
    LowerOptions(reduces=True),
    LowerOptions(reduces=True, keeps_unsharded=True),
]


def chunk_numbers(kind: ScheduleKind) -> tuple[int | None, ...]:
    return (1, 2, 3, 4) if kind is ScheduleKind.INTERLEAVED else (None,)


def tables(kind: ScheduleKind, p: int, ms) -> Iterator[Schedule]:
    for m in ms:
        for v in chunk_numbers(kind):
            if kind is not ScheduleKind.DUALPIPE_V or m >= 2 * p:
                yield generate(kind, num_stages=p, num_microbatches=m, num_chunks=v)


def assert_accepted(table: Schedule, options: list[LowerOptions]) -> None:
    verify(table)
    for one in options:
        shared = ((0, table.num_stages - 1),) if one.reduces and table.num_stages > 1 else ()
        verify(lower(table, replace(one, shared=shared)), shared=shared)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("kind", list(ScheduleKind))
def test_generated_tables_are_accepted(kind, p):
    """Cycles through the four lowering options, so that each is combined with each kind."""
    for number, table in enumerate(tables(kind, p, sorted({1, p, 2 * p + 1}))):
        assert_accepted(table, [OPTIONS[(number + p) % 4]])


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(ScheduleKind))
def test_all_generated_tables_are_accepted(kind):
    """Layouts of an odd and of a larger number of ranks; of four ranks all numbers of micro-batches until the steady
    state repeats, and a large one, lowered: cycling through the options, each meets each number of chunks, and even and
    odd numbers of micro-batches."""
    for p, ms in ((3, range(1, 33)), (8, (7, 8, 9, 16, 17, 31))):
        for table in tables(kind, p, ms):
            verify(table)
    for number, table in enumerate(tables(kind, 4, [*range(1, 10), 32])):
        assert_accepted(table, [OPTIONS[(number + number // 4) % 4]])


@given(st.randoms(use_true_random=False), st.sampled_from(OPTIONS))
def test_hand_made_tables_are_accepted(random, options):
    assert_accepted(random_table(random), [options])


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_seeded_fault_is_caught_and_named(fault):
    table = fault.make()
    with pytest.raises(ScheduleError) as caught:
        verify(table)
    error = caught.value
    assert error.where == fault.place(table)
    assert fault.at in error.what
    for words in fault.words:
        assert words in str(error), error
    assert error.rule and error.fix


def test_there_are_many_kinds_of_faults_of_good_tables():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 25
    for kind in ("1f1b", "f-then-b", "zb-h1", "zb-v"):
        verify(base(kind))
    verify(lowered(options=EVERYTHING).done())


def test_only_rendezvous_shows_the_deadlock_of_two_senders():
    """It completes if sends don't block, or if the send and receive on either rank are adjacent, i.e. batched."""
    table = both_send_first(apart_on=(0, 1))
    assert simulate(table, Costs.uniform()).makespan > 0
    with pytest.raises(ScheduleError, match="2 of 2 ranks deadlock"):
        verify(table)
    for apart_on in ((), (0,), (1,)):
        verify(both_send_first(apart_on=apart_on))


def test_a_deadlock_is_shown_on_its_circle_and_not_on_a_rank_that_waits_for_it():
    """Ranks 1 and 2 of four block each other; rank 0 has the lower number, and waits too."""
    edit = lowered("f-then-b", p=4, m=2).move("1SEND_F1", after="1B0")
    with pytest.raises(ScheduleError, match="ranks deadlock: rank 0 at position") as caught:
        verify(edit.done())
    assert caught.value.where.startswith("rank 1, position")


def test_torchs_table_is_the_one_that_torch_makes():
    """Its last line starts with micro-batch 1 and ends with one that doesn't exist; the others are those of 1F1B."""
    lines = TORCH_1F1B.read_text().splitlines()
    good = base("1f1b").to_csv().splitlines()
    assert [line.removesuffix(f",{rank}REDUCE_GRAD") for rank, line in enumerate(lines[:3])] == good[:3]
    assert lines[3].startswith("3F1,3B0,3F2,3B1") and lines[3].endswith("3F8,3B7,3REDUCE_GRAD")


REPEATS = {
    "a W beside B": lambda edit, f, m: edit.insert(f"{f}W{m}", after=f"{f}B{m}"),
    "an I before B": lambda edit, f, m: edit.insert(f"{f}I{m}", after=f"{f}F{m}"),
    "an I after B": lambda edit, f, m: edit.insert(f"{f}I{m}", after=f"{f}B{m}"),
    "I and W beside B": lambda edit, f, m: edit.insert(f"{f}W{m}", after=(b := f"{f}B{m}")).insert(f"{f}I{m}", after=b),
    "no B": lambda edit, f, m: edit.drop(f"{f}B{m}"),
    "I instead of B": lambda edit, f, m: edit.put(f"{f}B{m}", f"{f}I{m}"),
    "W instead of B": lambda edit, f, m: edit.put(f"{f}B{m}", f"{f}W{m}"),
}


def apply_fix(table: Schedule, error: ScheduleError) -> Schedule:
    """The table after the first of a fix's alternatives, which `error` names with rank and position."""
    edit, rank = Edit(table), int(re.match(r"rank (\d+)", error.where)[1])
    if later := re.search(r" or (\w+) later", error.fix):
        row = edit.rows[rank]
        at = row.index(later[1])
        row[at : at + 2] = row[at : at + 2][::-1]
        return edit.done()
    words = re.split(r",? or |, since ", error.fix)[0]
    if names := re.fullmatch(r"remove (\w+)(?: and (\w+))?", words):
        return edit.drop(*filter(None, names.groups())).done()
    name, side, position = re.fullmatch(r"(?:put|add) (\w+) (before|after) position (\d+)", words).groups()
    edit.rows[rank].insert(int(position) - (side == "before"), name)
    return edit.done()


@pytest.mark.parametrize("fault", REPEATS)
@pytest.mark.parametrize("kind", ["1f1b", "f-then-b", "interleaved"])
def test_the_fix_of_a_backward_leaves_one_of_each(fault, kind):
    """Whatever is missing or repeated, following fixes leads to a table with the same work, each once."""
    right = base(kind, p=2, m=3)
    for stage, m in product(range(right.num_stages), range(3)):
        assert_repaired(right, REPEATS[fault](Edit(right), stage, m).done(), stage, m)


def assert_repaired(right, table, stage, m):
    """Assert that following fixes of a table leads to the work of a right one, that of one backward perhaps split."""
    for _ in range(20):
        try:
            verify(table)
            break
        except ScheduleError as error:
            table = apply_fix(table, error)
    verify(table)
    work = Counter((part.kind, part.stage, part.microbatch) for _, _, part in table.positions())
    split = {(kind, stage, m) for kind in (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)}
    same = {(part.kind, part.stage, part.microbatch) for _, _, part in right.positions()}
    assert set(work.values()) == {1}
    assert set(work) in (same, same - {(ActionKind.BACKWARD, stage, m)} | split)


def test_a_stage_that_works_on_a_micro_batch_not_at_all():
    table = Edit(base("1f1b")).drop("2F3", "2B3").done()
    with pytest.raises(ScheduleError, match="2F3 is missing") as caught:
        verify(table)
    assert caught.value.where == "rank 2, not at any of its 14 positions"


@pytest.mark.parametrize(
    ("changes", "what", "where"),
    [
        ({"num_microbatches": 0}, "the table has 0 micro-batches", ""),
        ({"stage_ranks": (0, 1, 2, 4)}, "stage 3 is on rank 4 of a table with 4 rows", "stage_ranks[3]"),
        ({"stage_ranks": (0, 1, 2, -1)}, "stage 3 is on rank -1 of a table with 4 rows", "stage_ranks[3]"),
        ({"stage_ranks": (0, 1, 2)}, "rank 3 has no stage", "rank 3"),
        ({"actions": base("1f1b").actions[:3]}, "stage 3 is on rank 3 of a table with 3 rows", "stage_ranks[3]"),
        ({"actions": (*base("1f1b").actions, ())}, "rank 4 has no stage", "rank 4"),
    ],
)
def test_numbers_that_do_not_fit_each_other(changes, what, where):
    with pytest.raises(ScheduleError) as caught:
        verify(replace(base("1f1b"), **changes))
    assert (caught.value.what, caught.value.where) == (what, where)
    assert caught.value.rule and caught.value.fix


def test_an_action_of_a_whole_stage_with_a_micro_batch():
    rows = base("1f1b").actions
    row = (*rows[0], Action(ActionKind.REDUCE, 0, 3))
    with pytest.raises(ScheduleError, match="0REDUCE3 has a micro-batch"):
        verify(replace(base("1f1b"), actions=(row, *rows[1:])))


def test_an_evaluation_has_forwards_only():
    table = forward_only(4, (0, 1, 1, 0))
    verify(table, trains=False)
    verify(lower(table), trains=False)
    with pytest.raises(ScheduleError, match="0F0 has no 0B0"):
        verify(table)
    with pytest.raises(ScheduleError, match="0B0 is part of a backward"):
        verify(base("1f1b"), trains=False)
    with pytest.raises(ScheduleError, match="3F3 is missing"):
        verify(Edit(table).drop("3F3").done(), trains=False)


@pytest.mark.parametrize(
    ("shared", "what", "where"),
    [
        (((1, 3),), "0SYNC_SHARED is not expected here", "rank 0, position {}, 0SYNC_SHARED"),
        (((0, 3), (0, 3)), "0SYNC_SHARED is missing on rank 0", "rank 0, after position {}, 0SYNC_SHARED"),
        (((0, 3), (2, 3)), "2SYNC_SHARED is missing on rank 2", "rank 2, after position {}, 2SYNC_SHARED"),
        ((), "0SYNC_SHARED is not expected here", "rank 0, position {}, 0SYNC_SHARED"),
    ],
)
def test_groups_that_are_known_sync_once_each(shared, what, where):
    table = sharded().done()
    verify(table, shared=((0, 3),))
    with pytest.raises(ScheduleError) as caught:
        verify(table, shared=shared)
    last = len(table.actions[int(where[5])])
    assert (caught.value.what, caught.value.where) == (what, where.format(last))


def test_groups_sync_in_one_order_on_all_ranks():
    table = lower(
        generate("zb-v", num_stages=2, num_microbatches=4), LowerOptions(reduces=True, shared=((0, 1), (3, 2)))
    )
    verify(table, shared=((0, 1), (3, 2)))
    with pytest.raises(ScheduleError, match="0SYNC_SHARED comes where 3SYNC_SHARED is expected"):
        verify(table, shared=((3, 2), (0, 1)))


def test_a_large_table_takes_as_many_calls_an_action_as_a_small_one():
    """`verify` takes linear time."""

    def calls_an_action(num_microbatches):
        table = lower(generate("interleaved", num_stages=8, num_microbatches=num_microbatches, num_chunks=4))
        count = [0]

        def profile(frame, event, argument):
            count[0] += event in ("call", "c_call")

        sys.setprofile(profile)
        try:
            verify(table)
        finally:
            sys.setprofile(None)
        return count[0] / sum(map(len, table.actions))

    assert calls_an_action(32) < 1.2 * calls_an_action(8)


SMALL = {
    (kind, options): lower(generate(kind, num_stages=p, num_microbatches=m), options)
    for kind, p, m in (("1f1b", 3, 4), ("zb-v", 2, 4), ("interleaved", 2, 4), ("dualpipe-v", 2, 4), ("zb-h1", 3, 3))
    for options in (LowerOptions(), LowerOptions(reduces=True, keeps_unsharded=True, shared=((0, 1),)))
}


@pytest.mark.parametrize("key", list(SMALL), ids=lambda key: f"{key[0]}-{'sharded' if key[1].reduces else 'plain'}")
def test_every_action_of_a_lowered_table_is_needed_once(key):
    """Each single deletion and each single duplication is caught."""
    table = SMALL[key]
    verify(table, shared=key[1].shared)
    run_on_paper(table, key[1])
    for rank, row in enumerate(table.actions):
        for at in range(len(row)):
            for changed in ((*row[:at], *row[at + 1 :]), (*row[: at + 1], *row[at:])):
                with pytest.raises(ScheduleError):
                    verify(with_row(table, rank, changed), shared=key[1].shared)


def with_row(table: Schedule, rank: int, row) -> Schedule:
    return replace(table, actions=(*table.actions[:rank], tuple(row), *table.actions[rank + 1 :]))


@given(st.sampled_from(list(SMALL)), st.data())
@settings(max_examples=400)
def test_what_is_accepted_after_a_swap_runs_right(key, data):
    table = SMALL[key]
    rank = data.draw(st.integers(0, table.num_ranks - 1))
    row = list(table.actions[rank])
    for _ in range(data.draw(st.integers(1, 2))):
        first = data.draw(st.integers(0, len(row) - 2))
        second = data.draw(st.integers(first + 1, min(first + 4, len(row) - 1)))
        row[first], row[second] = row[second], row[first]
    changed = with_row(table, rank, row)
    try:
        verify(changed, shared=key[1].shared)
    except ScheduleError:
        return
    run_on_paper(changed, key[1])


@pytest.mark.parametrize("fault", [*TRANSFER_FAULTS, *MEMORY_FAULTS, *STAGE_FAULTS], ids=lambda f: f.name)
def test_the_paper_executor_finds_the_faults_too(fault):
    """Validates the paper executor, which is the reference for what `verify` accepts."""
    table = fault.make()
    options = EVERYTHING if "REDUCE" in table.to_json() else LowerOptions()
    with pytest.raises(Wrong):
        run_on_paper(table, options)
