"""No false alarms: what is right is proved, with every axis, schedule, mask, optimizer and kind of model.

Frozen parameters keep their bits, and gradients of recomputed blocks have the bits of those that are not recomputed.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
import torch

from meshwright.errors import ConfigError
from meshwright.plan.rules import load
from meshwright.prove.spec import as_proof
from tests.prove.proofs import assert_proved, records_of, small_config, small_dit_config, small_expert_config

POISON = "train.global_batch=16 pipeline.poison=true"
TIED = "model.tie_embeddings=true"
PIPE = "mesh.pp=2 train.num_microbatches=4"
UNEVEN = f"{PIPE} pipeline.poison=true pipeline.allow_empty_stages=true"
EXACT = "comm.gradients=exact-via-all-to-all"
ZB_V = "mesh.pp=2 pipeline.schedule=zb-v model.num_layers=4 train.num_microbatches=4"
PACKED, DROPOUT = "data.packing=documents", "train.dropout=0.25"
RING, HEADS = "mesh.cp_method=ring", "mesh.cp_method=heads model.num_heads=8 model.num_kv_heads=8"
FROZEN, SELECTIVE = 'train.freeze=["embed.*","blocks.0.*"]', "recompute.policy=selective"
KEPT = "recompute.policy=full mesh.reshard_after_forward=false"
MUON = "train.optimizer=muon"
GROUPS = "train.parameter_groups=['vector:weight_decay=0.3','blocks.1.*:lr=0.001','embedding:lr=0.02,weight_decay=0']"
LLAMA = {
    "one process": f"train.global_batch=16 train.num_microbatches=4 {TIED}",
    "HSDP": "mesh.dp_replicate=2 mesh.dp_shard=2",
    "tp": "mesh.tp=2 train.global_batch=16 train.num_microbatches=4",
    "tp, whole sequences": f"mesh.tp=2 mesh.sequence_parallel=false {TIED}",
    "dp_shard 3, uneven": f"mesh.dp_shard=3 train.global_batch=12 train.num_microbatches=4 {TIED}",
    "recomputed": "recompute.policy=full mesh.dp_shard=2",
    # Every schedule on four ranks of its own, or on two beside another axis.
    "f-then-b": f"mesh.pp=4 pipeline.schedule=f-then-b train.num_microbatches=8 model.num_layers=4 {POISON}",
    "1f1b": f"mesh.dp_shard=2 {PIPE} pipeline.schedule=1f1b {TIED} {POISON}",
    "interleaved": f"mesh.pp=4 pipeline.schedule=interleaved train.num_microbatches=8 model.num_layers=8 {TIED} "
    f"{POISON}",
    "zb-h1": f"mesh.tp=2 {PIPE} pipeline.schedule=zb-h1 {POISON}",
    "zb-v": f"mesh.pp=4 pipeline.schedule=zb-v train.num_microbatches=8 model.num_layers=8 {TIED} {POISON}",
    "dualpipe-v": f"mesh.dp_replicate=2 {PIPE} pipeline.schedule=dualpipe-v model.num_layers=4 {TIED} {POISON}",
    "v-half": f"mesh.pp=4 pipeline.schedule=v-half train.num_microbatches=8 model.num_layers=8 {POISON}",
    "v-min": f"mesh.dp_shard=2 {PIPE} pipeline.schedule=v-min model.num_layers=4 {TIED} {POISON}",
    "uneven stages": f"{UNEVEN} mesh.pp=4 model.num_layers=8 pipeline.layers_per_stage=[3,2,2,1]",
    "an empty stage": f"{UNEVEN} mesh.pp=4 model.num_layers=3 pipeline.layers_per_stage=[1,0,1,1] "
    "pipeline.schedule=zb-h1",
    "no layer first": f"{UNEVEN} pipeline.layers_per_stage=[0,2]",
    "no layer last": f"{UNEVEN} pipeline.layers_per_stage=[2,0] pipeline.schedule=zb-h1 {TIED}",
    # What the empty stages were sent may not be handed on in its slot, which the next receive overwrites.
    "empty stages within a rank": f"{UNEVEN} pipeline.schedule=zb-v pipeline.layers_per_stage=[0,1,0,1]",
    "recomputed, split backward": f"{PIPE} recompute.policy=full pipeline.schedule=zb-h1",
    "without release": f"{PIPE} pipeline.release=false",
    "kept gathered, split backward": f"{PIPE} mesh.dp_shard=2 mesh.reshard_after_forward=false pipeline.schedule=zb-h1",
    "whole sequences in stages": f"{PIPE} mesh.tp=2 mesh.sequence_parallel=false",
    "fewer micro-batches than stages": "mesh.pp=2 train.num_microbatches=1",
    # The way of compressed gradients, without loss.
    "exact, two nodes": f"{EXACT} mesh.dp_shard=4 comm.ranks_per_node=2",
    "exact, replicas of shards": f"{EXACT} mesh.dp_replicate=2 mesh.dp_shard=2 train.num_microbatches=2",
    "exact, zb-v": f"{EXACT} {ZB_V} mesh.dp_shard=2 {TIED}",
    "exact, a rank a node": f"{EXACT} mesh.dp_shard=2 mesh.tp=2 comm.ranks_per_node=2",
    "exact, frozen": f"{EXACT} mesh.dp_shard=2 train.freeze=['blocks.0.*','norm.*']",
    "exact, secondary shards": f"{EXACT} mesh.dp_shard=4 comm.secondary_shards=2",
    # Both methods of cp with each mask and with split backwards.
    "heads, window": f"mesh.cp=2 {HEADS} model.window=6 model.global_every=2 {FROZEN} train.global_batch=16",
    "ring, documents and window": f"mesh.cp=2 {RING} {PACKED} model.window=4 {KEPT} train.global_batch=16 "
    "train.num_microbatches=4",
    "ring 4": f"mesh.cp=4 {RING} {SELECTIVE} train.global_batch=16",
    "ring, window, replicas": f"mesh.cp=2 {RING} model.window=6 model.global_every=2 mesh.dp_replicate=2 {FROZEN} "
    "train.global_batch=16",
    "ring, documents, zb-v": f"mesh.cp=2 {RING} {PACKED} {ZB_V} train.num_microbatches=2 {SELECTIVE} "
    "train.global_batch=16",
    "heads, documents, tp": f"mesh.cp=2 {HEADS} {PACKED} mesh.tp=2 mesh.sequence_parallel=false {SELECTIVE} "
    "train.global_batch=16",
    "heads, zb-v": f"mesh.cp=2 {HEADS} {ZB_V} train.num_microbatches=2 {FROZEN} train.global_batch=16",
    "heads 4, documents and window": f"mesh.cp=4 {HEADS} {PACKED} model.window=4 {KEPT} train.global_batch=16",
    # The same elements are dropped as on one device.
    "dropout, tp, recomputed": f"{DROPOUT} mesh.tp=2 recompute.policy=full",
    "dropout, tp, whole sequences": f"{DROPOUT} mesh.tp=2 mesh.sequence_parallel=false",
    "dropout, cp, documents": f"{DROPOUT} mesh.cp=2 {PACKED} train.num_microbatches=2",
    "dropout, zb-v, recomputed": f"{DROPOUT} {ZB_V} recompute.policy=full",
    "muon": f"{MUON} mesh.dp_shard=2",
    "muon on dp_shard 3, uneven": f"{MUON} mesh.dp_shard=3 train.global_batch=6 model.ffn_dim=25",
    "muon on HSDP": f"{MUON} mesh.dp_replicate=2 mesh.dp_shard=2",
    "muon on zb-v": f"{MUON} {ZB_V}",
    "muon and groups on tp": f"{MUON} {GROUPS} mesh.tp=2",
    "sgd": "train.optimizer=sgd mesh.dp_shard=2",
    "adamw and groups on pp, tied": f"{GROUPS} mesh.pp=2 {TIED}",
    "an own optimizer of whole matrices": "train.optimizer=tests.optim.own:Whole mesh.dp_shard=2",
    "odd sizes, tied, chunks": f"{PIPE} {TIED} model.dim=27 model.head_dim=6 model.ffn_dim=23 model.vocab_size=257 "
    "pipeline.chunks=2 model.num_layers=5 pipeline.layers_per_stage=[2,1,1,1]",
}
EP = "mesh.dp_shard=2 mesh.ep=2 train.global_batch=16"
BIAS = "model.balance_bias=true model.bias_rate=0.05"
EP_OF_CP = "mesh.cp=2 mesh.ep=2 train.global_batch=16"
FROZEN_EXPERTS = 'train.freeze=["blocks.*.moe.experts.*"] mesh.reshard_after_forward=false'
EXPERTS = {
    "sigmoid, groups, recomputed": f"{EP} model.score=sigmoid model.num_groups=4 model.top_groups=2 {BIAS} "
    "model.route_scale=2.5 model.num_dense_layers=1 recompute.policy=full train.num_microbatches=4",
    "ep 2 of dp_shard 4": f"{EP} mesh.dp_shard=4 {EXACT} train.num_microbatches=4",
    # The load of the global batch is that of one micro-batch.
    "replicated, balance of the global batch": f"{EP} mesh.dp_replicate=2 model.balance_scope=global-batch "
    f"model.z_loss=0.01 {FROZEN_EXPERTS}",
    "tp, bias, shared experts": f"{EP} mesh.tp=2 {BIAS} model.balance_loss=0 model.num_shared_experts=1 "
    "recompute.policy=full",
    "tp, whole sequences, capacity": f"{EP} mesh.tp=2 mesh.sequence_parallel=false model.drop=over-capacity "
    f"model.capacity_factor=1.0 {EXACT}",
    "zb-v, bias": f"{EP} {ZB_V} {BIAS} model.balance_loss=0 model.num_shared_experts=1 {FROZEN_EXPERTS}",
    "dualpipe-v, capacity": f"{EP} {ZB_V} pipeline.schedule=dualpipe-v model.drop=over-capacity "
    "model.capacity_factor=1.0 recompute.policy=full",
    "muon": f"{MUON} mesh.dp_shard=2 mesh.ep=2",
    "dropout, recomputed": f"{DROPOUT} mesh.dp_shard=2 mesh.ep=2 recompute.policy=full",
    "ep over cp": f"{EP_OF_CP} model.balance_scope=global-batch model.z_loss=0.01 recompute.policy=full",
    "ep over cp, bias, documents": f"{EP_OF_CP} {BIAS} model.balance_loss=0 {PACKED}",
    "ep of dp_shard × cp, heads, window": f"{EP_OF_CP} mesh.dp_shard=2 mesh.cp_method=heads model.num_heads=4 "
    "model.num_kv_heads=4 model.window=6 model.global_every=2",
    "ep inside cp 4": f"mesh.cp=4 mesh.ep=2 {PACKED} train.global_batch=16",
    "ep over cp, dualpipe-v": f"{EP_OF_CP} {ZB_V} pipeline.schedule=dualpipe-v {SELECTIVE}",
}
EMPTY = "pipeline.allow_empty_stages=true"
DIT_PIPE = f"{PIPE} model.num_layers=4"
DIT = {
    # Stages that share parameters, with one layer more than stages.
    "videos on pp 4": "dit-digits-video mesh.pp=4 train.num_microbatches=4 model.num_layers=5 "
    "pipeline.layers_per_stage=[2,1,1,1]",
    "videos in chunks": f"dit-digits-video {PIPE} pipeline.chunks=2 model.num_layers=5 "
    "pipeline.layers_per_stage=[2,1,1,1]",
    "chunks, dp_shard": "pipeline.chunks=2 mesh.dp_shard=2 train.num_microbatches=4 model.num_layers=3 "
    "pipeline.layers_per_stage=[2,1]",
    "pp, dp_shard": f"{PIPE} mesh.dp_shard=2 model.num_layers=3 pipeline.layers_per_stage=[2,1]",
    "tp": "mesh.tp=2 model.ffn_dim=22",
    "HSDP": "mesh.dp_replicate=2 mesh.dp_shard=2 pipeline.chunks=2 train.num_microbatches=2",
    "zb-h1": f"{DIT_PIPE} pipeline.schedule=zb-h1",
    "recompute, zb-v, kept gathered": f"{DIT_PIPE} {KEPT} pipeline.schedule=zb-v mesh.dp_shard=2",
    "velocity, linear": "diffusion.prediction=velocity diffusion.schedule=linear",
    "an empty stage": f"{DIT_PIPE} pipeline.chunks=2 pipeline.layers_per_stage=[2,0,1,1] {EMPTY} pipeline.poison=true",
    "a rank without layers": f"{DIT_PIPE} pipeline.schedule=zb-v pipeline.layers_per_stage=[2,0,0,2] {EMPTY}",
    "more classes than are drawn": "diffusion.label_dropout=0 diffusion.guidance=1 model.num_classes=200",
    "dropout": f"{DROPOUT} mesh.dp_shard=2",
}
EMBEDDERS = "'time_embed.*','label_embed.*'"
DIT |= {
    f"frozen: {name}": f"train.num_microbatches=4 model.num_layers=4 {words} train.freeze=[{globs}]"
    for name, (words, globs) in {
        "one process": ("", EMBEDDERS),
        "chunks, what the first stage has": ("pipeline.chunks=2", f"'embed.*','blocks.0.*',{EMBEDDERS}"),
        "chunks, all but a bias of the first stage": ("pipeline.chunks=2",
            "'final.*','blocks.*','*embed.*eight','time_embed.*'"),
        "chunks, one embedder": ("mesh.pp=2 pipeline.chunks=2", "'label_embed.weight'"),
        "chunks, all but the first stage": ("mesh.pp=2 pipeline.chunks=2", "'final.*','blocks.[123].*'"),
        "kept gathered, what the first rank has": ("mesh.pp=2 mesh.dp_shard=2 mesh.reshard_after_forward=false",
            f"'embed.*','blocks.0.*','blocks.1.*',{EMBEDDERS}"),
        "zb-v, all matrices": ("mesh.pp=2 pipeline.schedule=zb-v", "'*.weight'"),
        "zb-h1, recompute, some blocks": ("mesh.pp=2 pipeline.schedule=zb-h1 recompute.policy=full",
            "'blocks.1.*','blocks.2.*'"),
        "dp_shard": ("mesh.dp_shard=2", EMBEDDERS),
        # No layer of the first stage takes the condition: its embedders are trained by the other stages alone.
        "what a first stage does not read": (f"mesh.pp=2 pipeline.layers_per_stage=[0,4] {EMPTY}", "'embed.*'"),
    }.items()
}  # fmt: skip
LLAMA |= {
    "frozen, the tied embedding": f"{ZB_V} {TIED} train.freeze=['embed.weight']",
    "frozen, all but the tied embedding": f"{ZB_V} {TIED} train.freeze=['blocks.*','norm.weight']",
}
QUICK = {
    "llama": ("recomputed", "empty stages within a rank", "exact, two nodes", "heads, window", "muon",
              "dropout, tp, recomputed"),
    "experts": ("sigmoid, groups, recomputed", "ep over cp"),
    "dit": ("videos on pp 4", "frozen: chunks, one embedder"),
}  # fmt: skip
MAKERS = {"llama": (small_config, LLAMA), "experts": (small_expert_config, EXPERTS), "dit": (small_dit_config, DIT)}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        pytest.param(model, name, marks=() if name in QUICK[model] else pytest.mark.slow)
        for model, (_, layouts) in MAKERS.items()
        for name in layouts
    ],
)
def test_a_right_layout_is_proved(gang, documents, model, name):
    make, layouts = MAKERS[model]
    words = layouts[name].split()
    config = make(*words, *([documents] if PACKED in words else []))
    records = records_of(gang, config)
    assert_proved(gang, config, records)
    if not config.train.freeze:
        return
    seen = set()
    for record in records:
        for parameter, (_, last) in record.steps[-1]["weights"].items():
            if ".router.load." in parameter:
                continue  # buffers, counts and biases, which have no gradient
            is_frozen = any(fnmatchcase(parameter, glob) for glob in config.train.freeze)
            seen.add(is_frozen)
            same = torch.equal(record.initial[parameter][1], last)
            assert same == (is_frozen or not last.numel()), parameter
            assert (parameter in record.steps[0]["gradients"]) != is_frozen, parameter
    assert seen == {True, False}


def test_the_quick_ones_are_there():
    assert all(set(names) <= set(MAKERS[model][1]) for model, names in QUICK.items())


RECOMPUTED = "mesh.pp=2 model.num_layers=4 train.num_microbatches=4"
FULL, BY_BLOCK = "recompute.policy=full", f"{SELECTIVE} recompute.blocks=['full:0','none:3']"
EVERY_OTHER = "pipeline.schedule=zb-v train.freeze=['blocks.0.*','blocks.2.*']"
POLICIES = [
    (small_config, SELECTIVE, EVERY_OTHER),
    (small_config, FULL, "train.freeze=['embed.*','blocks.*','norm.*']"),
    (small_config, BY_BLOCK, "pipeline.schedule=interleaved mesh.dp_shard=2"),
    (small_config, SELECTIVE, "pipeline.schedule=zb-v train.dropout=0.25"),
    (small_expert_config, SELECTIVE, "pipeline.schedule=zb-v"),
    (small_expert_config, BY_BLOCK, "pipeline.schedule=1f1b train.freeze=['embed.*']"),
    (small_dit_config, SELECTIVE, "pipeline.schedule=interleaved"),
    (small_dit_config, FULL, EVERY_OTHER),
]


@pytest.mark.parametrize("at", [pytest.param(at, marks=pytest.mark.slow if at else ()) for at in range(len(POLICIES))])
def test_recomputation_is_proved_with_the_bits_of_none(gang, at):
    make, policy, words = POLICIES[at]
    found, due = (make(*RECOMPUTED.split(), *words.split(), *more.split()) for more in (policy, ""))
    records, plain = records_of(gang, found), records_of(gang, due)
    assert_proved(gang, found, records)
    for record, expected in zip(records, plain, strict=True):
        for step, plain_step in zip(record.steps, expected.steps, strict=True):
            gradients, right = step["gradients"], plain_step["gradients"]
            assert gradients.keys() == right.keys()
            assert all(torch.equal(gradients[name][1], value) for name, (_, value) in right.items())


@pytest.mark.parametrize(
    "table", ["0F0,0F1,0B1,0B0\n1F0,1F1,1I1,1W1,1B0\n", "0F1,0F0,0B1,0B0\n1F1,1B1,1F0,1B0\n"], ids=["W", "order"]
)
def test_a_table_from_a_file_is_proved(gang, tmp_path, table):
    """Any that `verify` takes: backwards, or all, in another order of micro-batches."""
    path = tmp_path / "mine.csv"
    path.write_text(table)
    assert_proved(gang, small_config("mesh.pp=2", f"pipeline.schedule={path}", "train.num_microbatches=2"))


@pytest.mark.slow
def test_a_stage_without_layers_has_gradients_of_its_embedders_all_the_same(gang):
    """Nothing there reads the condition, so its part of the sum is nothing; the sum is on every copy."""
    words = (*DIT_PIPE.split(), "pipeline.layers_per_stage=[0,4]", EMPTY, "mesh.dp_shard=2")
    result = assert_proved(gang, small_dit_config(*words))
    shared = [p for p in result.parameters if p.name in ("time_embed.fc1.weight", "label_embed.weight")]
    assert len(shared) == 2
    for parameter in shared:
        assert parameter.gradient.replicated == ("pp",) and parameter.gradient.replicas_equal
        assert parameter.update.replicas_equal


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["comm.gradients=loco4"], "comm.gradients=exact-via-all-to-all"),
        (["comm.weights=int8", "comm.gradients=bf16"], "comm.gradients=exact-via-all-to-all comm.weights=exact"),
    ],
)
def test_what_loses_digits_is_not_proved(words, fix):
    with pytest.raises(ConfigError, match="lossy") as caught:
        as_proof(load("llama-tiny", words))
    assert caught.value.fix == fix
