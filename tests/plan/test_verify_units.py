"""Units with missing, duplicate or misplaced parameters, or wrong reduction axes, are found."""

from __future__ import annotations

import pytest

from tests.plan.plans import NORM, TIED, assert_found, with_root, with_unit

FAULTS = {
    "in no unit": (
        TIED,
        lambda p: with_unit(p, "block", parameters=p.kind("block").units[0].parameters[1:]),
        NORM,
        None,
        "block/attention_norm.weight is in no unit",
    ),
    "in two units": (
        TIED,
        lambda p: with_root(p, 0, parameters=(*p.stages[0].root.parameters, NORM)),
        NORM,
        None,
        "block/attention_norm.weight is in 2 units: block, root",
    ),
    "in another unit than its module": (
        TIED,
        lambda p: with_unit(p, "block", modules=("attention",)),
        NORM,
        None,
        "in unit block, but its module is wrapped by root",
    ),
    "a root without its end": (
        TIED,
        lambda p: with_root(p, 0, parameters=()),
        "embed/embed.weight",
        None,
        "embed/embed.weight is in no unit",
    ),
    "a member that does not exist": (
        TIED,
        lambda p: with_unit(p, "block", parameters=(*p.kind("block").units[0].parameters, "bias")),
        "block/bias",
        None,
        "unit block lists block/bias, which does not exist",
    ),
    "members in another order": (
        TIED,
        lambda p: with_unit(p, "block", parameters=p.kind("block").units[0].parameters[::-1]),
        None,
        None,
        "out of order",
    ),
    "a unit over tp": (
        TIED,
        lambda p: with_unit(p, "block", sharded=("dp_shard", "tp")),
        None,
        "tp",
        "unit block shards over tp",
    ),
    "replicas not reduced": (
        TIED,
        lambda p: with_unit(p, "block", replicas=()),
        None,
        "dp_replicate",
        "unit block replicates nothing over dp_replicate",
    ),
    "sharded and repeated the other way round": (
        TIED,
        lambda p: with_unit(p, "block", sharded=("dp_replicate",), replicas=("dp_shard",)),
        None,
        "dp_shard",
        "unit block shards nothing over dp_shard",
    ),
    "a root without a module": (
        TIED,
        lambda p: with_root(p, 1, modules=()),
        None,
        None,
        "the root's modules are nothing",
    ),
    "secondary shards that do not divide": (
        "llama-tiny mesh.dp_shard=4 mesh.tp=2",
        lambda p: with_unit(p, "block", freed=3),
        None,
        "dp_shard",
        "unit block has secondary shards over 3 of 4 ranks",
    ),
    "a codec that is none": (
        TIED,
        lambda p: with_unit(p, "block", gradients="int3"),
        None,
        None,
        "gradients of unit block cannot be sent as 'int3'",
    ),
    "a codec of gradients for weights": (
        TIED,
        lambda p: with_unit(p, "block", weights="loco4"),
        None,
        None,
        "weights of unit block cannot be sent as 'loco4'",
    ),
    "a block not gathered for its backward": (
        TIED,
        lambda p: with_unit(p, "block", in_backward=False),
        None,
        None,
        "unit block is not gathered for the backward",
    ),
}


@pytest.mark.parametrize("base, plant, parameter, axis, words", FAULTS.values(), ids=FAULTS)
def test_faults_are_found(base, plant, parameter, axis, words):
    assert_found(base, plant, parameter, axis, words)
