"""Queries of tables; they round-trip through JSON and CSV, and errors in hand-written ones are located."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import ScheduleError
from meshwright.pipeline import Schedule, generate, lower, verify
from meshwright.pipeline.actions import Action, ActionKind, Overlap
from meshwright.pipeline.lower import LowerOptions
from meshwright.pipeline.schedule_table import parse_action, single_stage
from tests.pipeline.random_tables import random_table

TORCH_DUALPIPE_V = Path(__file__).with_name("torch_dualpipe_v.csv")
tables = st.builds(random_table, st.randoms(use_true_random=False), splits=st.booleans(), overlaps=st.booleans())
options = st.builds(LowerOptions, release=st.booleans(), reduces=st.booleans(), keeps_unsharded=st.booleans())


F, B = ActionKind.FORWARD, ActionKind.BACKWARD


def test_each_forward_is_followed_by_its_backward():
    [actions] = single_stage(5).actions
    assert [str(action) for action in actions] == [f"0{k}{m}" for m in range(5) for k in "FB"]


def test_a_transfer_and_its_other_end():
    send = Action(ActionKind.SEND_FORWARD, 2, 3)
    assert str(send) == "2SEND_F3" and str(send.peer()) == "3RECV_F3" and send.peer().peer() == send
    back = Action(ActionKind.SEND_BACKWARD, 3, 1)
    assert str(back.peer()) == "2RECV_B1" and back.peer().peer() == back


def test_stages_of_a_v():
    overlap = Overlap(Action(F, 0, 1), Action(B, 3, 0))
    table = Schedule("test", 2, (0, 1, 1, 0), ((overlap,), ()))
    assert table.num_stages == 4 and table.num_ranks == 2 and table.num_chunks == 2
    assert table.stages_of(0) == (0, 3) and table.stages_of(1) == (1, 2)
    assert [table.is_transfer(stage) for stage in range(-1, 5)] == [False, True, False, True, False, False]
    assert [str(part) for _, _, part in table.positions()] == ["0F1", "3B0"]


def test_the_fingerprint_is_of_everything():
    row = (Action(F, 0, 0), Action(B, 0, 0))
    tables = [Schedule("a", 1, (0,), (row,)), Schedule("b", 1, (0,), (row,)), Schedule("a", 2, (0,), (row,)),
              Schedule("a", 1, (0,), (row[::-1],)), Schedule("a", 1, (1,), ((), row))]  # fmt: skip
    assert len({table.fingerprint() for table in tables}) == len(tables)


@given(tables)
def test_a_compute_table_survives_json_and_csv(table):
    assert Schedule.from_json(table.to_json()) == table
    assert Schedule.from_csv(table.to_csv(), kind=table.kind) == table


@given(tables, options)
def test_a_lowered_table_survives_json_and_its_csv_is_what_was_lowered(table, options):
    lowered = lower(table, options)
    again = Schedule.from_json(lowered.to_json())
    assert again == lowered
    assert again.fingerprint() == lowered.fingerprint()
    assert Schedule.from_csv(lowered.to_csv(), kind=table.kind) == table


@given(tables, tables)
def test_fingerprints_differ_where_tables_do(first, second):
    assert (first.fingerprint() == second.fingerprint()) == (first == second)


def test_blanks_comments_and_what_torch_reduces_mean_nothing():
    table = Schedule.from_csv("# two ranks\n\n 0F0 ,,0B0, 0REDUCE_GRAD\n  # second\n,1F0,1B0,\n")
    assert [[str(action) for action in row] for row in table.actions] == [["0F0", "0B0"], ["1F0", "1B0"]]
    assert (table.stage_ranks, table.num_microbatches) == ((0, 1), 1)


@pytest.mark.parametrize(
    ("source", "where", "what", "fix"),
    [
        ("0F0,0G0\n", "x.csv, line 1, column 5", "'0G0' is not an action", "such as 2F3"),
        ("0F0,0B0\n# a comment\n1F0,  1b0\n", "x.csv, line 3, column 7", "'1b0' is not an action", "1B0"),
        ("0F0,F\n", "x.csv, line 1, column 5", "'F' is not an action", "such as 2F3"),
        ("0F\n", "x.csv, line 1, column 1", "'0F' is not an action", "0F with its micro-batch, such as 2F3"),
        ("0F0 0B0\n", "x.csv, line 1, column 1", "'0F0 0B0' is not an action", "0F0,0B0"),
        ("0F0@3\n", "x.csv, line 1, column 1", "'0F0@3' is not an action", "0F0"),
        ("0F0,0F1+0X0\n", "x.csv, line 1, column 5", "'0F1+0X0' is not an action", "such as 2F3"),
        ("0F0,0F1+\n", "x.csv, line 1, column 5", "'0F1+' is not an action", "0F1"),
        ("0F0,0SEND_F0\n", "x.csv, line 1, column 5", "0SEND_F0 is not a computation", "remove 0SEND_F0"),
        ("0F0,0REDUCE\n", "x.csv, line 1, column 5", "0REDUCE is not a computation", "remove 0REDUCE"),
        ("0F" + "9" * 5000 + "\n", "x.csv, line 1, column 1", "is not an action", "such as 2F3"),
        ("0F0,0B0\n0F1,0B1\n", "x.csv", "stage 0 is on rank 0 and on rank 1 (0F1)", "0F1 to the line of rank 0"),
        ("0F0,0B0\n2F0,2B0\n", "x.csv", "stage 1 is missing, but stage 2 is present", "actions of stage 1"),
        ("999999999F0\n", "x.csv", "stage 0 is missing, but stage 999999999 is present", "actions of stage 0"),
        ("", "x.csv", "no actions", ""),
        ("# nothing\n,,\n", "x.csv", "no actions", ""),
    ],
)
def test_a_typo_is_shown_with_line_and_column(source, where, what, fix):
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_csv(source, where="x.csv")
    assert caught.value.where == where
    assert what in caught.value.what
    assert fix in caught.value.fix
    assert caught.value.rule


@given(st.text(alphabet="012FBIWSEND_RCV@+,# \n", max_size=30))
def test_any_text_is_a_table_or_an_explained_error(source):
    try:
        table = Schedule.from_csv(source)
    except ScheduleError as error:
        assert error.where and error.rule
    else:
        assert Schedule.from_csv(table.to_csv()) == table


@pytest.mark.parametrize(
    ("cell", "fix"), [("0REDUCE3", "0REDUCE"), ("2SEND_F1@0", "2SEND_F1"), ("3RESHARD0@1", "3RESHARD")]
)
def test_the_fix_of_a_cell_is_an_action(cell, fix):
    with pytest.raises(ScheduleError) as caught:
        parse_action(cell)
    assert caught.value.fix == fix
    assert str(parse_action(fix)) == fix


TYPOS = {
    "lower case": str.lower,
    "spaces": lambda cell: cell.replace("F", " F "),
    "underscores": lambda cell: cell.replace("B", "_B_"),
    "a slot": lambda cell: cell if "+" in cell else f"{cell}@0",
    "PyTorch's overlap without its kind": lambda cell: f"({cell.replace('+', ';')})" if "+" in cell else cell,
    "PyTorch's overlap in other words": lambda cell: f"({cell.replace('+', ' ; ')})OVERLAP" if "+" in cell else cell,
    "a plus too many": lambda cell: f"{cell}+",
}


@given(tables, st.sampled_from(list(TYPOS)), st.data())
def test_the_fix_of_a_typo_keeps_the_schedule(table, typo, data):
    rows = [[str(action) for action in row] for row in table.actions]
    rank = data.draw(st.sampled_from([rank for rank, row in enumerate(rows) if row]))
    at = data.draw(st.integers(0, len(rows[rank]) - 1))
    rows[rank][at] = TYPOS[typo](rows[rank][at])
    try:
        found = Schedule.from_csv(as_csv(rows), kind=table.kind)
    except ScheduleError as error:
        rows[rank][at] = error.fix
        found = Schedule.from_csv(as_csv(rows), kind=table.kind)
    assert found == table


@given(st.builds(random_table, st.randoms(use_true_random=False), overlaps=st.just(True)))
def test_pytorchs_overlaps_are_read(table):
    rows = [[str(action) for action in row] for row in table.actions]
    of_torch = [[f"({cell.replace('+', ';')})OVERLAP_F_B" if "+" in cell else cell for cell in row] for row in rows]
    assert Schedule.from_csv(as_csv(of_torch), kind=table.kind) == table


def as_csv(rows):
    return "".join(",".join(row) + "\n" for row in rows)


def test_pytorchs_dualpipe_v_is_read_and_verified():
    """As `ScheduleDualPipeV` of torch 2.13 computes it, for two ranks and four micro-batches."""
    table = Schedule.from_csv(TORCH_DUALPIPE_V.read_text())
    verify(table)
    assert table.stage_ranks == (0, 1, 1, 0) and table.num_microbatches == 4
    assert sum(len(action.parts()) == 2 for row in table.actions for action in row) == 6


GOOD = json.loads(generate("1f1b", num_stages=2, num_microbatches=2).to_json())


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "not a pipeline table"),
        ('{"format": "another"}', "not a pipeline table"),
        (json.dumps({key: GOOD[key] for key in GOOD if key != "kind"}), "KeyError: 'kind'"),
        (json.dumps({**GOOD, "num_microbatches": "many"}), "ValueError"),
        (json.dumps({**GOOD, "stage_ranks": None}), "TypeError"),
        (json.dumps({**GOOD, "actions": [["0F0"]]}), "AttributeError"),
    ],
)
def test_json_that_is_no_table(source, what):
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_json(source, where="a.json")
    assert what in caught.value.what
    assert caught.value.where == "a.json"


def test_a_bad_action_in_json_is_shown_with_rank_and_position():
    with pytest.raises(ScheduleError, match="'1FF1' is not an action") as caught:
        Schedule.from_json(json.dumps({**GOOD, "actions": ["0F0", "1F0 1FF1"]}), where="a.json")
    assert caught.value.where == "a.json, rank 1, action 2"
