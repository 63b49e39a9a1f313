"""The one-stage table is gradient accumulation, and the executor does what stands in it and nothing else."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.pipeline.execute import execute
from meshwright.pipeline.table import Action, ActionKind, Schedule, one_stage

FORWARD, BACKWARD = ActionKind.FORWARD, ActionKind.BACKWARD


@given(st.integers(1, 20))
def test_each_forward_is_followed_by_its_backward(num_microbatches):
    [actions] = one_stage(num_microbatches).actions
    assert [str(action) for action in actions] == [f"0{k}{m}" for m in range(num_microbatches) for k in "FB"]


def run(schedule, rank=0):
    seen = []

    def forward(microbatch):
        seen.append(f"F{microbatch}")
        return torch.tensor(float(microbatch))

    def backward(loss, last):
        seen.append(f"B{int(loss)}{' last' if last else ''}")

    execute(schedule, rank=rank, forward=forward, backward=backward)
    return seen


@given(st.integers(1, 20))
def test_exactly_the_last_backward_is_told_that_it_is(num_microbatches):
    seen = run(one_stage(num_microbatches))
    assert [entry for entry in seen if "last" in entry] == [f"B{num_microbatches - 1} last"] == seen[-1:]


@given(st.permutations(range(4)), st.permutations(range(4)))
def test_the_table_decides_the_order(forwards, backwards):
    actions = tuple(Action(FORWARD, 0, m) for m in forwards) + tuple(Action(BACKWARD, 0, m) for m in backwards)
    table = Schedule("test", 4, (1,), ((), actions))
    assert run(table, rank=0) == []
    seen = run(table, rank=1)
    assert [int(entry[1]) for entry in seen] == [*forwards, *backwards]


def test_a_table_without_backward_is_fine():
    assert run(Schedule("test", 1, (0,), ((Action(FORWARD, 0, 0),),))) == ["F0"]
