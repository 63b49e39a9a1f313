"""Policies of single blocks: what they mean, and what is refused with a fix that works."""

from __future__ import annotations

import pytest

from meshwright.config.resolve import policy_of
from meshwright.errors import ConfigError
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory import stage_costs
from meshwright.plan.rules import load
from tests.plan.test_memory import planned


def policies(*words):
    config = load("llama-tiny", ["model.num_layers=8", *words])
    return "".join(policy_of(config.recompute, layer)[0] for layer in range(8))


def test_each_block_has_the_policy_of_the_entry_that_names_it():
    assert policies() == "nnnnnnnn"
    assert policies("recompute.policy=selective") == "ssssssss"
    assert policies("recompute.blocks=full:0-3") == "ffffnnnn"
    assert policies("recompute.policy=full", "recompute.blocks=['selective:0,2-3','none:7']") == "sfssfffn"


@pytest.mark.parametrize("layout", [[], ["mesh.pp=2", "train.num_microbatches=2"],
                                    ["mesh.pp=2", "pipeline.chunks=2", "train.num_microbatches=2"]])  # fmt: skip
def test_blocks_with_different_policies_are_different_kinds_on_any_layout(layout):
    words = ["model.num_layers=8", "recompute.blocks=['full:0-2','selective:4,6']", *layout]
    plan = make_plan(load("llama-tiny", words))
    found = [plan.kind(name) for stage in sorted(plan.stages, key=lambda one: one.layers) for name in stage.kinds]
    assert "".join(kind.recompute[0] for kind in found) == "fffnsnsn"
    assert sorted({kind.name for kind in found}) == ["block", "block.2", "block.3"]


@pytest.mark.parametrize(
    ("blocks", "what"),
    [
        ("fast:0-1", "has the entry fast:0-1"),
        ("full", "has the entry full"),
        ("full:", "has the entry full:"),
        ("full:1-", "has the entry full:1-"),
        ("full:-1", "has the entry full:-1"),
        ("full:3-1", "has the range 3-1 in full:3-1"),
        ("full:0-4", "names layer 4 in full:0-4, but the model has layers 0-3"),
        ("['full:0-1','selective:1']", "names layer 1 twice: full:0-1 and selective:1"),
        ("full:2,1-3", "names layer 2 twice"),
    ],
)
def test_wrong_entries_are_refused_with_a_fix_that_works(blocks, what):
    with pytest.raises(ConfigError) as caught:
        load("llama-tiny", [f"recompute.blocks={blocks}"])
    assert what in caught.value.what and "recompute.blocks" in caught.value.where
    fix = caught.value.fix.split(" or ")[0].replace("'", "")
    load("llama-tiny", [fix])


def test_compiling_a_recomputed_block_with_step_handles_is_refused():
    with pytest.raises(ConfigError, match="layer 2 recomputed under the policy selective"):
        load("moe-tiny", ["train.compile=true", "recompute.blocks=selective:2"])
    load("llama-tiny", ["train.compile=true", "recompute.blocks=selective:2"])


def test_memory_follows_the_policy_of_each_block():
    def kept(*words):
        plan = planned("llama-tiny", ["model.num_layers=4", *words])
        (costs,) = (stage_costs(plan, stage) for stage in plan.stages)
        return costs.activation_bytes

    none, selective, full = (kept(f"recompute.policy={policy}") for policy in RecomputePolicy)
    assert full < selective < none
    assert kept("recompute.blocks=['full:0','selective:1-2']") == none - (none - full) // 4 - (none - selective) // 2
