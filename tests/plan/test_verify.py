"""Correct plans pass verification, and single changes are found with their parameter and axis."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time

import pytest

from meshwright.errors import ConfigError, LayoutError, ScheduleError
from meshwright.models.contract.tp_styles import ROW, STREAM
from meshwright.pipeline.actions import ActionKind
from meshwright.plan.run_plan import GradientPlacement, Shard
from meshwright.plan.serialize import from_json, to_json
from meshwright.plan.verify import faults, verify
from tests.plan.plans import (
    ALL,
    DIT,
    LARGEST,
    LAYOUTS,
    TIED,
    fake,
    plan_of,
    with_kind,
    with_parameter,
    without,
    without_action,
)

MESHES = (
    {},
    {"tp": 2},
    {"tp": 2, "sequence_parallel": False},
    {"tp": 2, "dp_shard": 2, "dp_replicate": 2, "pp": 2},
    {"tp": 4, "dp_shard": 2, "sequence_parallel": False},
    {"dp_replicate": 4},
    {"cp": 2, "tp": 2},
    {"cp": 2, "tp": 2, "dp_shard": 2, "pp": 2},
)


@pytest.mark.parametrize("words", LAYOUTS)
def test_right_plans(words):
    assert faults(plan_of(words)) == []
    verify(plan_of(words))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_right_plans_of_another_family(mesh):
    assert faults(fake(**mesh)) == []


def test_gradients_of_another_family():
    """The rule's table, checked cell by cell."""
    rows = {"wq.weight": "SS", "wq.bias": "SS", "q_norm.weight": "PP", "wo.weight": "SS", "wo.bias": "=="}
    found = {True: {}, False: {}}
    for sequence_parallel in (True, False):
        plan = fake(tp=2, dp_shard=2, sequence_parallel=sequence_parallel)
        for parameter in plan.kind("block").parameters:
            assert parameter.gradient("dp_shard") is GradientPlacement.PARTIAL
            letter = {"sharded": "S", "partial": "P", "equal": "="}[parameter.gradient("tp").value]
            found[sequence_parallel][parameter.name.removeprefix("attention.")] = letter
        summed = {name for one in plan.sums for name in one.parameters}
        assert ("block/attention.q_norm.weight" in summed) and ("block/norm.weight" in summed) is sequence_parallel
    assert {name: found[True][name] + found[False][name] for name in rows} == rows
    assert {name: found[True][name] + found[False][name] for name in ("norm.weight", "router.weight")} == {
        "norm.weight": "P=",
        "router.weight": "P=",
    }


def test_context_parallel_in_the_plan():
    """Sums, units, what ranks keep and exchange follow from the axis."""
    one, two = fake(tp=2, pp=2), fake(tp=2, pp=2, cp=2)
    block, divided = one.kind("block"), two.kind("block")
    assert divided.saved.none * 2 == block.saved.none > 0
    assert [c.elements for c in divided.collectives] == [c.elements // 2 for c in block.collectives]
    assert two.edge.shards == (Shard(0, ("cp", "tp")),) and two.loss.summed == ("pp", "cp")
    assert {unit.sharded for stage in two.stages for unit in two.units(stage)} == {("cp",)}
    assert all(parameter.gradient("cp") is GradientPlacement.PARTIAL for parameter in divided.parameters)
    assert divided.buffers[0].summed == ("cp", "tp") and divided.auxiliary[0].work == ("cp", "tp")


def test_the_largest_is_quick():
    plan = plan_of(LARGEST)
    assert plan.mesh.num_ranks() == 16_384
    started = time.process_time()
    verify(plan)
    assert time.process_time() - started < 1.0


def test_how_many_more():
    wrong = without(plan_of(TIED), "sum")
    with pytest.raises(LayoutError) as error:
        verify(wrong)
    assert error.value.what.startswith("block/attention_norm.weight: its gradient is partial over tp")
    assert error.value.what.endswith(f"; and {len(faults(wrong)) - 1} more faults")
    assert error.value.where == "plan, sums, stages 0–1"
    assert error.value.fix == "add a sum of block/attention_norm.weight over tp"


def test_a_schedule_is_named():
    wrong = without_action(plan_of(TIED), ActionKind.SYNC_SHARED)
    with pytest.raises(ScheduleError, match="SYNC_SHARED is missing"):
        verify(wrong)


def test_what_no_plan_can_know():
    """A wrong style with matching `work` and sum passes verification; gradients of the module reveal it in prove."""
    plan = fake(tp=2, dp_shard=2, sequence_parallel=False)
    styles = tuple((path, STREAM if path == "attention.q_norm" else style) for path, style in plan.kind("block").styles)
    wrong = without(with_kind(plan, "block", styles=styles), "sum")
    wrong = with_parameter(wrong, "block/attention.q_norm.weight", work=("dp_shard",))
    assert faults(wrong) == []
    mistaken = tuple((path, ROW if path == "attention.wq" else style) for path, style in plan.kind("block").styles)
    assert faults(with_kind(plan, "block", styles=mistaken))


def test_nothing_else_is_raised():
    """Verification of any readable plan reports faults and never crashes."""

    def other(value):
        if isinstance(value, list):
            return value[1:] or None, value * 2, value[::-1]
        return {bool: (False, True), int: (0, 1, 7), str: ("", "tp", "x")}.get(type(value), ())

    found = 0
    for plan in (plan_of(TIED), plan_of(DIT), fake(**ALL)):
        tree = json.loads(to_json(plan))
        places = [place for place in places_in(tree) if place[0] is not tree["schedule"]["actions"]]
        for place, key in places[::61]:
            before = place[key]
            for value in other(before):
                place[key] = value
                with contextlib.suppress(ConfigError, ScheduleError):
                    found += bool(faults(from_json(json.dumps(tree), where="plan.json")))
            place[key] = before
    assert found > 30


def places_in(tree):
    """Yield all lists and objects in JSON with all their keys."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield tree, key
        if isinstance(value, dict | list):
            yield from places_in(value)


def test_without_torch():
    """Reading and verifying a plan imports neither torch nor numpy."""
    code = (
        "import sys; import meshwright.plan.verify, meshwright.plan.serialize, meshwright.plan.compare;"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
