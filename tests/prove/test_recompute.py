"""Recomputation policies are proved over schedules, shards and frozen parameters, with the gradients' bits of none."""

from __future__ import annotations

import pytest
import torch

from meshwright.prove.report import render
from tests.prove.proofs import (
    few_pictures,
    prove_with,
    record_few_steps,
    small_config,
    small_dit_config,
    small_expert_config,
)

FAMILIES = {"decoder": small_config, "experts": small_expert_config, "dit": small_dit_config}
POLICIES = {
    "selective": ("recompute.policy=selective",),
    "full": ("recompute.policy=full",),
    "by block": ("recompute.policy=selective", "recompute.blocks=['full:0','none:3']"),
}
SCHEDULES = ("1f1b", "zb-v", "interleaved")
FROZEN = {
    "nothing": (),
    "embeddings": ("embed.*", "label_embed.*", "time_embed.*"),
    "every other block": ("blocks.0.*", "blocks.2.*"),
    "all but the head": ("embed.*", "blocks.*", "norm.*", "label_embed.*", "time_embed.*"),
}
LAYOUT = ("mesh.pp=2", "model.num_layers=4", "train.num_microbatches=4", "train.global_batch=8")
MATRIX = [
    ("decoder", "selective", "zb-v", 1, "every other block"),
    ("decoder", "full", "1f1b", 1, "all but the head"),
    ("decoder", "by block", "interleaved", 2, "nothing"),
    ("experts", "selective", "zb-v", 1, "nothing"),
    ("experts", "by block", "1f1b", 1, "embeddings"),
    ("dit", "selective", "interleaved", 1, "nothing"),
    ("dit", "full", "zb-v", 1, "every other block"),
]


@pytest.mark.parametrize(
    ("family", "policy", "schedule", "shards", "frozen"),
    [pytest.param(*case, marks=() if case == MATRIX[0] else pytest.mark.slow) for case in MATRIX],
)
def test_policies_are_proved(gang, family, policy, schedule, shards, frozen):
    others = ("norm.*",) if family == "dit" else ("label_embed.*", "time_embed.*")
    globs = [glob for glob in FROZEN[frozen] if glob not in others]
    words = [*LAYOUT, f"pipeline.schedule={schedule}", f"mesh.dp_shard={shards}", f"train.freeze={globs}"]
    assert_proved_with_the_bits_of_none(gang, family, words, policy)


@pytest.mark.slow
def test_selective_recomputation_drops_the_same_elements(gang):
    words = [*LAYOUT, "pipeline.schedule=zb-v", "train.dropout=0.25"]
    assert_proved_with_the_bits_of_none(gang, "decoder", words, "selective")


def assert_proved_with_the_bits_of_none(gang, family, words, policy):
    """A policy is proved, and its gradients are bitwise those without recomputation."""
    records = {}
    for name, own in (("none", ()), (policy, POLICIES[policy])):
        config = FAMILIES[family](*words, *own)
        ranks = config.mesh.axes().num_ranks()
        records[name] = gang(ranks).run(record_few_steps, config, few_pictures(config))
    result = prove_with(records[policy], config)
    assert result.passed, "\n".join(render(result))
    for found, expected in zip(records[policy], records["none"], strict=True):
        assert found.gradients.keys() == expected.gradients.keys()
        for name, gradients in expected.gradients.items():
            assert same_bits(found.gradients[name], gradients), name


def same_bits(found, expected):
    """Whether two recorded gradients are the same, tensors bitwise."""
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, tuple | list):
        return len(found) == len(expected) and all(map(same_bits, found, expected))
    return found == expected
