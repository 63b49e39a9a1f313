"""Recomputation policies are proved over schedules, shards and frozen parameters, with the gradients' bits of none."""

from __future__ import annotations

import pytest
import torch

from tests.prove.proofs import assert_proved, records_of, small_config, small_dit_config, small_expert_config

LAYOUT = "mesh.pp=2 model.num_layers=4 train.num_microbatches=4"
SELECTIVE, FULL = "recompute.policy=selective", "recompute.policy=full"
BY_BLOCK = f"{SELECTIVE} recompute.blocks=['full:0','none:3']"
EVERY_OTHER = "train.freeze=['blocks.0.*','blocks.2.*']"
CASES = {
    "zb-v, every other block frozen": (small_config, SELECTIVE, f"pipeline.schedule=zb-v {EVERY_OTHER}"),
    "1f1b, all frozen but the head": (small_config, FULL, "train.freeze=['embed.*','blocks.*','norm.*']"),
    "interleaved, by block": (small_config, BY_BLOCK, "pipeline.schedule=interleaved mesh.dp_shard=2"),
    "dropout": (small_config, SELECTIVE, "pipeline.schedule=zb-v train.dropout=0.25"),
    "experts, zb-v": (small_expert_config, SELECTIVE, "pipeline.schedule=zb-v"),
    "experts, by block": (small_expert_config, BY_BLOCK, "pipeline.schedule=1f1b train.freeze=['embed.*']"),
    "pictures, interleaved": (small_dit_config, SELECTIVE, "pipeline.schedule=interleaved"),
    "pictures, zb-v, every other block frozen": (small_dit_config, FULL, f"pipeline.schedule=zb-v {EVERY_OTHER}"),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if at else ()) for at, n in enumerate(CASES)])
def test_policies_are_proved_with_the_bits_of_none(gang, name):
    make, policy, words = CASES[name]
    config = make(*LAYOUT.split(), *words.split(), *policy.split())
    records = records_of(gang, config)
    assert_proved(gang, config, records)
    plain = records_of(gang, make(*LAYOUT.split(), *words.split()))
    for found, expected in zip(records, plain, strict=True):
        for step, plain_step in zip(found.steps, expected.steps, strict=True):
            gradients, due = step["gradients"], plain_step["gradients"]
            assert gradients.keys() == due.keys()
            assert all(torch.equal(gradients[name][1], value) for name, (_, value) in due.items())
