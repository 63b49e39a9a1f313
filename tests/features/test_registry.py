"""Features are found by their table: their files exist, what is off isn't loaded, and nobody else names them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright
from meshwright.features.contract import OnRank, PlanFeature, RunFeature
from meshwright.features.registry import FEATURES, part_types, plan_features
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.plan.serialize import encode, from_json, to_json

SOURCE = Path(meshwright.__file__).parent
NAMES = re.compile(r"features\.float8|\bfloat8\.(recipe|layers|history|cached)|\.float8\b|Float8\w+")
WORDS_ONLY = {"config/foreign_names.py"}
"""Names of other frameworks' keys."""


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_a_feature_is_what_its_entry_says(feature):
    assert isinstance(feature.run(), RunFeature)
    assert feature.configured is not None or feature.planned is not None
    if feature.adds_parts:
        assert isinstance(feature.plan(), PlanFeature) and feature.plan().part.feature == feature.name


def test_nothing_outside_names_float8_but_the_schema_and_the_registry():
    """So what it takes to turn it off and on is in one folder."""
    found = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if NAMES.search(path.read_text("utf-8")) and "features/float8" not in path.as_posix()
    }
    assert found - WORDS_ONLY == {"config/schema.py", "features/registry.py"}


def test_a_feature_that_is_off_is_not_loaded():
    code = """
import sys
from meshwright.plan.rules import load
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory import predict_memory
from meshwright.plan.verify import verify
plan = make_plan(load("llama-tiny", sys.argv[1:]))
verify(plan)
predict_memory(plan)
print(*(name for name in sys.modules if name.startswith("meshwright.features.float8.")))
"""
    off, on = (
        subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True).stdout.split()
        for words in ([], ["float8.recipe=current"])
    )
    assert off == ["meshwright.features.float8.section"] and "meshwright.features.float8.plan" in on


def test_parts_are_fields_of_kinds_in_json():
    plan = make_plan(load("llama-tiny", ["float8.recipe=current", "train.loss_chunk=64"]))
    text = to_json(plan)
    assert from_json(text, where="plan") == plan
    blocks, others = (
        [encode(kind)["float8"] for kind in plan.kinds if kind.is_block is is_block] for is_block in (True, False)
    )
    assert all(one["recipe"] == "current" for one in blocks) and set(others) == {None}
    assert [type(one).part for one in plan_features(plan=plan)] == list(part_types().values())


def test_what_a_feature_leaves_out_does_nothing():
    state = OnRank()
    with state.counting(), state.running():
        state.begin()
    state.end_step(applied=True)
    assert not state.state() and not list(state.notes()) and state.is_steady()
    assert state.sent() is state.traffic() is None and state.all_to_alls() == ()
