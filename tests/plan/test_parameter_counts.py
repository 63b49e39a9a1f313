"""Parameters are counted once, and what tp leaves replicated is said."""

from __future__ import annotations

import pytest

from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.plan.run_plan import RunPlan
from meshwright.plan.stage_sizes import num_params, replicated_note


def plan_of(*words: str) -> RunPlan:
    return make_plan(load(words[0], words[1:]))


@pytest.mark.parametrize("layout", [(), ("mesh.tp=2",), ("mesh.pp=2", "mesh.dp_shard=2")])
def test_every_layout_has_as_many(layout: tuple[str, ...]) -> None:
    width, ffn, vocabulary, layers = 128, 384, 256, 4
    block = 3 * width * width + 3 * width * ffn + 2 * width  # half as many heads of keys and of values
    assert num_params(plan_of("llama-tiny", *layout)) == layers * block + 2 * vocabulary * width + width


def test_what_stays_replicated_is_said() -> None:
    """The example's attention has no style by itself."""
    [said] = replicated_note(plan_of("module-tiny", "mesh.tp=2"))
    assert said.startswith("tp shards 50 % of the parameters")
    for words in (("module-tiny",), ("module-tiny", "mesh.dp_shard=2"), ("llama-tiny", "mesh.tp=2")):
        assert replicated_note(plan_of(*words)) == ()
