"""Queries of tables, and the single-stage table, which is gradient accumulation."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshwright.pipeline.actions import Action, ActionKind, Overlap
from meshwright.pipeline.schedule_table import Schedule, single_stage

F, B = ActionKind.FORWARD, ActionKind.BACKWARD


@given(st.integers(1, 20))
def test_each_forward_is_followed_by_its_backward(num_microbatches):
    [actions] = single_stage(num_microbatches).actions
    assert [str(action) for action in actions] == [f"0{k}{m}" for m in range(num_microbatches) for k in "FB"]


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
