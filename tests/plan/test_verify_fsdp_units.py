"""Missing and superfluous sums and means are found, and units with missing, duplicate or misplaced parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.plan.run_plan import ReducedBy, Shard, StepSum
from tests.plan.plans import (
    ALL,
    FROZEN,
    NORM,
    PLAIN,
    QUERY,
    TIED,
    assert_found,
    with_parameter,
    with_root,
    with_sum,
    with_unit,
    without,
)


def experts(plan, *, summed):
    """A matrix that dp_shard divides in use, and its unit reduces over dp_shard, too."""
    changed = with_parameter(plan, "block/router.weight", used=(Shard(0, ("dp_shard",)),), work=("tp",))
    return changed if summed else with_unit(changed, "block", sharded=())


FAULTS = {
    "no sum over tp": (TIED, lambda p: without(p, "sum"), NORM, "tp", "partial over tp, but summed there 0 times"),
    "a parameter left out of a sum": (TIED, lambda p: with_sum(p, "sum", parameters=p.sums[0].parameters[1:]), NORM,
        "tp", "block/attention_norm.weight: its gradient is partial over tp, but summed there 0 times"),
    "a sum done twice": (TIED, lambda p: replace(p, sums=(*p.sums, p.sums[0])), NORM, "tp",
        "partial over tp, but summed there twice"),
    "a sum over the wrong axis": (TIED, lambda p: with_sum(p, "sum", axes=("dp_shard",)), NORM, "dp_shard",
        "partial over dp_shard, but summed there twice"),
    "a sharded gradient summed": (TIED, lambda p: with_sum(p, "sum", parameters=(*p.sums[0].parameters, QUERY)), QUERY,
        "tp", "sharded over tp, but summed there once"),
    "an equal gradient summed": (PLAIN,
        lambda p: replace(p, sums=(StepSum((NORM,), ("tp",), "sum", ReducedBy.FSDP, "float32"),)), NORM, "tp",
        "equal over tp, but summed there once"),
    "a norm of queries not summed": ({"tp": 2, "dp_shard": 2, "sequence_parallel": False}, lambda p: without(p, "sum"),
        "block/attention.q_norm.weight", "tp", "partial over tp, but summed there 0 times"),
    "a row's bias summed": (ALL,
        lambda p: with_sum(p, "sum", parameters=(*p.sums[0].parameters, "block/attention.wo.bias")),
        "block/attention.wo.bias", "tp", "equal over tp, but summed there once"),
    "experts sharded and reduced": (ALL, lambda p: experts(p, summed=True), "block/router.weight", "dp_shard",
        "sharded over dp_shard, but summed there once, by unit block"),
    "all of a unit reduced as if experts": (ALL, lambda p: experts(p, summed=False), "block/norm.weight", "dp_shard",
        "partial over dp_shard, but summed there 0 times"),
    "something frozen summed": (FROZEN,
        lambda p: replace(p, sums=(StepSum((NORM,), ("tp",), "sum", ReducedBy.FSDP, "float32"),)), NORM, "tp",
        "is frozen, but summed over tp"),
    "something frozen averaged": (FROZEN,
        lambda p: replace(p, sums=(StepSum((NORM,), ("tp",), "mean", ReducedBy.OURS, "float32"),)), NORM, "tp",
        "is frozen, but averaged over tp"),
    "summed by DTensor under FSDP2": (TIED, lambda p: with_sum(p, "sum", by=ReducedBy.DTENSOR), NORM, "tp",
        "the sum of block/attention_norm.weight over tp is performed by dtensor"),
    "a sum in another dtype": (TIED, lambda p: with_sum(p, "sum", dtype="float16"), None, "tp",
        "the sum over tp by fsdp is in float16"),
    "a sum in the dtype of one micro-batch": (TIED, lambda p: with_sum(p, "sum", dtype="bfloat16"), NORM, "tp",
        "the sum over tp by fsdp is in bfloat16"),
    "a mean in fewer bits": (TIED, lambda p: with_sum(p, "mean", dtype="bfloat16"), NORM, "tp",
        "the mean over tp by ours is in bfloat16"),
    "a sum over stages": (TIED, lambda p: with_sum(p, "sum", axes=("tp", "pp")), None, "pp",
        "names pp, which is not inside a stage"),
    "a sum of nothing known": (TIED, lambda p: with_sum(p, "sum", parameters=("block/q_norm.weight",)),
        "block/q_norm.weight", None, "names 'block/q_norm.weight'"),
    "no mean": (TIED, lambda p: without(p, "mean"), NORM, "tp",
        "its replicas diverge over tp through loco4, but are averaged there 0 times"),
    "a mean twice": (TIED, lambda p: replace(p, sums=(*p.sums, p.sums[1])), NORM, "tp",
        "diverge over tp through loco4, but are averaged there twice"),
    "a mean without a lossy codec": (PLAIN,
        lambda p: replace(p, sums=(StepSum((NORM,), ("tp",), "mean", ReducedBy.OURS, "float32"),)), NORM, "tp",
        "stay equal over tp, but are averaged there once"),
    "a mean of shards": (TIED, lambda p: with_sum(p, "mean", parameters=(*p.sums[1].parameters, QUERY)), QUERY, "tp",
        "are shards over tp, but are averaged there once"),
    "a codec made lossy": (PLAIN, lambda p: with_unit(p, "block", weights="int8"), NORM, "tp",
        "diverge over tp through int8, but are averaged there 0 times"),
    "in no unit": (TIED, lambda p: with_unit(p, "block", parameters=p.kind("block").units[0].parameters[1:]), NORM,
        None, "block/attention_norm.weight is in no unit"),
    "in two units": (TIED, lambda p: with_root(p, 0, parameters=(*p.stages[0].root.parameters, NORM)), NORM, None,
        "block/attention_norm.weight is in 2 units: block, root"),
    "in another unit than its module": (TIED, lambda p: with_unit(p, "block", modules=("attention",)), NORM, None,
        "in unit block, but its module is wrapped by root"),
    "a root without its end": (TIED, lambda p: with_root(p, 0, parameters=()), "embed/embed.weight", None,
        "embed/embed.weight is in no unit"),
    "a member that does not exist": (TIED,
        lambda p: with_unit(p, "block", parameters=(*p.kind("block").units[0].parameters, "bias")), "block/bias", None,
        "unit block lists block/bias, which does not exist"),
    "members in another order": (TIED,
        lambda p: with_unit(p, "block", parameters=p.kind("block").units[0].parameters[::-1]), None, None,
        "out of order"),
    "a unit over tp": (TIED, lambda p: with_unit(p, "block", sharded=("dp_shard", "tp")), None, "tp",
        "unit block shards over tp"),
    "replicas not reduced": (TIED, lambda p: with_unit(p, "block", replicas=()), None, "dp_replicate",
        "unit block replicates nothing over dp_replicate"),
    "sharded and repeated the other way round": (TIED,
        lambda p: with_unit(p, "block", sharded=("dp_replicate",), replicas=("dp_shard",)), None, "dp_shard",
        "unit block shards nothing over dp_shard"),
    "a root without a module": (TIED, lambda p: with_root(p, 1, modules=()), None, None,
        "the root's modules are nothing"),
    "secondary shards that do not divide": ("llama-tiny mesh.dp_shard=4 mesh.tp=2",
        lambda p: with_unit(p, "block", freed=3), None, "dp_shard",
        "unit block has secondary shards over 3 of 4 ranks"),
    "a codec that is none": (TIED, lambda p: with_unit(p, "block", gradients="int3"), None, None,
        "gradients of unit block cannot be sent as 'int3'"),
    "a codec of gradients for weights": (TIED, lambda p: with_unit(p, "block", weights="loco4"), None, None,
        "weights of unit block cannot be sent as 'loco4'"),
    "a block not gathered for its backward": (TIED, lambda p: with_unit(p, "block", in_backward=False), None, None,
        "unit block is not gathered for the backward"),
}  # fmt: skip


@pytest.mark.parametrize("base, plant, parameter, axis, words", FAULTS.values(), ids=FAULTS)
def test_faults_are_found(base, plant, parameter, axis, words):
    assert_found(base, plant, parameter, axis, words)
