"""All ranks run one plan: a rank with another is told the first field that differs, before anything runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.errors import MeshwrightError
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.train.rank_checks import shared_nodes
from meshwright.train.rank_run import agree_on_plan

WORDS = ("mesh.pp=2", "train.num_microbatches=4")


def other_table(plan):
    rows = plan.schedule.actions
    return replace(plan, schedule=replace(plan.schedule, actions=((rows[0][1], rows[0][0], *rows[0][2:]), *rows[1:])))


def other_unit(plan):
    block = next(kind for kind in plan.kinds if kind.is_block)
    changed = replace(block, units=(replace(block.units[0], freed=False),))
    return replace(plan, kinds=tuple(changed if kind is block else kind for kind in plan.kinds))


def other_batch(plan):
    return replace(plan, batch=replace(plan.batch, global_batch=2 * plan.batch.global_batch))


CHANGES = {
    "": (None, ""),
    "table": (other_table, "schedule.actions[0][0]: 0F0 | 0SEND_F0"),
    "unit": (other_unit, "kinds[block].units[block].freed: true | false"),
    "batch": (other_batch, "batch.global_batch: 16 | 32"),
}


def agree(rank, world_size, change, odd_rank):
    plan = make_plan(load(None, WORDS))
    if change and rank == odd_rank:
        plan = CHANGES[change][0](plan)
    try:
        agree_on_plan(plan)
    except MeshwrightError as error:
        return error.what, error.where, error.rule, error.fix
    return None


@pytest.mark.parametrize("change", CHANGES)
def test_ranks_with_different_plans_are_told_the_first_field_that_differs(gang, change):
    told = gang(2).run(agree, change, 1)
    if not change:
        assert told == [None, None]
        return
    assert told[0] == told[1]
    what, where, rule, fix = told[0]
    field = CHANGES[change][1]
    assert what == f"ranks 0 and 1 have different plans: {field}" and where.startswith("rank 1, ")
    assert where.removeprefix("rank 1, ") in field and rule and fix


def test_the_odd_one_may_be_the_first(gang):
    for change, last in (("unit", "freed: false | true"), ("table", "schedule.actions[0][0]: 0SEND_F0 | 0F0")):
        told = gang(2).run(agree, change, 0)
        assert told[0] == told[1] and told[0][0].endswith(last) and told[0][1].startswith("rank 1, ")


def test_the_odd_one_may_be_any(gang):
    told = gang(4).run(agree, "table", 2)
    assert told == [told[0]] * 4
    assert told[0][0].startswith("ranks 0 and 2 have different plans: schedule") and told[0][1].startswith("rank 2, ")


def nodes(rank, world_size, hosts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_HOSTID", hosts[rank])
        return shared_nodes(world_size)


@pytest.mark.parametrize(
    ("hosts", "expected"), [("aabb", 2), ("aaaa", 4), ("abab", (0, 1, 0, 1)), ("aaab", (0, 0, 0, 1)), ("abcd", 1)]
)
def test_nodes_are_those_that_the_ranks_are_on(gang, hosts, expected):
    assert gang(4).run(nodes, hosts) == [expected] * 4


def test_one_rank_is_on_one_node():
    assert shared_nodes(1) is None
