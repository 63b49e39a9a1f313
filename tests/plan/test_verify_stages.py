"""Inconsistent stages, copies, edges, schedules and batches are found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.pipeline.actions import ActionKind
from meshwright.pipeline.schedule_table import Schedule
from meshwright.plan.run_plan import Shard
from tests.plan.plans import (
    DIT,
    PLAIN,
    TIED,
    assert_found,
    with_kind,
    with_parameter,
    with_root,
    with_stage,
    without_action,
)


def without_site(plan):
    key, sites = plan.shared[0]
    return replace(plan, shared=((key, sites[:1]), *plan.shared[1:]))


def edge(plan, **changes):
    return replace(plan.edge, **changes)


def layer_dropped(plan):
    first = plan.stages[0]
    return with_stage(plan, 0, layers=(0, first.layers[1] - 1), kinds=first.kinds[:-1])


FAULTS = {
    "a shared copy forgotten": (TIED, lambda p: replace(p, shared=()), "embed.weight", "pp",
        "embed.weight: its gradient is partial over pp, with copies on stages 0–1, but summed there 0 times"),
    "a site forgotten": (TIED, without_site, "embed.weight", "pp", "summed over pp at stage 0 (embed.weight), but"),
    "a site on no stage": (TIED,
        lambda p: replace(p, shared=(("embed.weight", ((0, "embed.weight"), (2, "head.weight"))),)), "embed.weight",
        "pp", "embed.weight is shared with stage 2 (head.weight), which does not exist"),
    "a copy that is frozen": (TIED, lambda p: with_parameter(p, "head/head.weight", trained=False), "head/head.weight",
        "pp", "embed.weight: its copies differ in trained, True on stage 0 and False on stage 1"),
    "a copy of another role": (TIED, lambda p: with_parameter(p, "head/head.weight", role="head"), "head/head.weight",
        "pp", "embed.weight: its copies differ in role, embedding on stage 0 and head on stage 1"),
    "a copy of another shape": (TIED, lambda p: with_parameter(p, "head/head.weight", shape=(512, 128)),
        "head/head.weight", "pp", "embed.weight: its copies differ in shape"),
    "a copy of nothing": (TIED, lambda p: with_parameter(p, "head/head.weight", key="wte.weight"), "head/head.weight",
        None, "head/head.weight is a copy of wte.weight, which is on no stage"),
    "a norm counted twice": (TIED, lambda p: replace(p, norm_omits=()), "embed.weight", "pp",
        "the gradient norm counts it on stage 0, and again on stage 1"),
    "a norm left out": (TIED, lambda p: replace(p, norm_omits=((0, "embed.weight"), *p.norm_omits)), "embed.weight",
        "pp", "the gradient norm leaves it out on stage 0"),
    "an embedder of one stage forgotten": (DIT, lambda p: replace(p, shared=p.shared[1:]), "label_embed.weight", "pp",
        "label_embed.weight: its gradient is partial over pp, with copies on stages 0–1, but summed there 0 times"),
    "a layer dropped": (TIED, layer_dropped, None, None, "but the previous stages end at layer 1"),
    "a layer without a kind": (TIED, lambda p: with_stage(p, 1, kinds=p.stages[1].kinds[1:]), None, None,
        "stage 1 lists 1 kind for 2 layers"),
    "an end forgotten": (TIED, lambda p: with_root(with_stage(p, 1, after=()), 1, parameters=()), "head/norm.weight",
        None, "head is on no stage"),
    "an end of every stage forgotten": (DIT,
        lambda p: with_root(with_stage(p, 1, before=()), 1, parameters=("final/final.modulation.weight",)),
        "embedders/time_embed.fc1.weight", None, "embedders must be on every stage, but is missing here"),
    "an end recomputed": (TIED, lambda p: with_kind(p, "embed", recompute="full"), None, None,
        "embed is an end, but is recomputed"),
    "a block as an end": (TIED, lambda p: with_kind(p, "block", path="block"), None, None, "block is an end"),
    "an edge whose ends disagree": (TIED, lambda p: with_stage(p, 1, edge_in=edge(p, shards=())), None, "tp",
        "stage 1 receives stream (128, 128) bfloat16, not stream (128, 128) bfloat16, dim 0 sharded over tp"),
    "an edge sent by the last": (TIED, lambda p: with_stage(p, 1, edge_out=p.edge), None, None,
        "stage 1 sends stream (128, 128) bfloat16, dim 0 sharded over tp, not nothing"),
    "an edge sharded without sequence parallel": (PLAIN,
        lambda p: replace(p, edge=edge(p, shards=(Shard(0, ("tp",)),))), None, "tp", "stream is sharded over tp"),
    "an edge of another dtype": (PLAIN, lambda p: replace(p, edge=edge(p, dtype="bfloat16")), None, None,
        "unit block computes in float32, but edge.dtype is bfloat16"),
    "a stage on another rank": (TIED, lambda p: with_stage(p, 1, pp_rank=0), None, "pp",
        "stage 1 is on pp rank 0, but on 1 in the schedule"),
    "a backward split": (TIED, lambda p: with_stage(p, 0, splits_backward=True), None, None,
        "stage 0 splits its backward, unlike the schedule"),
    "shared gradients not synced": (TIED, lambda p: without_action(p, ActionKind.SYNC_SHARED), None, "pp",
        "0SYNC_SHARED is missing on rank 0"),
    "gradients not reduced": (TIED, lambda p: without_action(p, ActionKind.REDUCE), None, "dp_replicate",
        "the schedule has no REDUCE"),
    "a schedule that is not lowered": ("llama-tiny mesh.pp=2 train.num_microbatches=4",
        lambda p: replace(p, schedule=p.schedule.compute_only()), None, "pp", "no sends between its ranks"),
    "a backward left out": (PLAIN,
        lambda p: replace(p, schedule=Schedule("one stage", 1, (0,), (p.schedule.actions[0][:1],))), None, "pp",
        "0F0 has no 0B0"),
    "a batch that does not add up": (TIED, lambda p: replace(p, batch=replace(p.batch, samples=3)), None,
        "dp_replicate", "3 samples × 4 micro-batches × 4 ranks = 48"),
    "other micro-batches than the schedule's": (TIED,
        lambda p: replace(p, batch=replace(p.batch, num_microbatches=2, samples=4)), None, None,
        "2 micro-batches, but the schedule 4"),
    "the loss not summed over stages": (TIED, lambda p: replace(p, loss=replace(p.loss, summed=p.loss.summed[1:])),
        None, "pp", "loss.summed names pp 0 times, but the loss is partial there"),
    "the loss summed over tp": (TIED, lambda p: replace(p, loss=replace(p.loss, summed=(*p.loss.summed, "tp"))), None,
        "tp", "loss.summed names tp 1 times, but the loss is replicated there"),
}  # fmt: skip


@pytest.mark.parametrize("base, plant, parameter, axis, words", FAULTS.values(), ids=FAULTS)
def test_faults_are_found(base, plant, parameter, axis, words):
    assert_found(base, plant, parameter, axis, words)
