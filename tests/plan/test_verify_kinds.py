"""Faults in kinds are found: parameters that contradict their styles, buffers, traffic and unknown names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.models.contract.tp_styles import COLUMN, gather
from meshwright.optim.catalogue import OptimizerState
from meshwright.plan.run_plan import Shard
from tests.plan.plans import (
    ALL,
    NORM,
    PLAIN,
    QUERY,
    TIED,
    assert_found,
    with_buffer,
    with_kind,
    with_parameter,
    with_stage,
    with_update,
    without,
)

ONE_STATE = (OptimizerState("m", None, "float32"),)


def with_mesh_view(plan, name, atoms):
    views = tuple((view, atoms if view == name else old) for view, old in plan.mesh.views)
    return replace(plan, mesh=replace(plan.mesh, views=views))


FAULTS = {
    "a column sharded as a row": (TIED, lambda p: with_parameter(p, QUERY, used=(Shard(1, ("tp",)),)), QUERY, "tp",
        "has style column, but is sharded over tp along dim 1, not dim 0"),
    "a column not sharded": (TIED, lambda p: with_parameter(p, QUERY, used=()), QUERY, "tp",
        "has style column, but is sharded over tp along no dim, not dim 0"),
    "a norm sharded": (TIED,
        lambda p: with_parameter(p, NORM, used=(Shard(0, ("tp",)),), work=("dp_replicate", "dp_shard")), NORM, "tp",
        "has style stream, but is sharded over tp along dim 0, not no dim"),
    "work left out with its sum": (TIED,
        lambda p: without(with_parameter(p, NORM, work=("dp_replicate", "dp_shard")), "sum"), NORM, "tp",
        "has style stream, with sequence parallelism, but tp is not in `work`"),
    "data left out of work": (TIED, lambda p: with_parameter(p, QUERY, work=("dp_replicate",)), QUERY, "dp_shard",
        "is applied to all data, although dp_shard shards it"),
    "sharded and applied to parts": (TIED, lambda p: with_parameter(p, QUERY, work=("dp_replicate", "dp_shard", "tp")),
        QUERY, "tp", "and its operator's input are both sharded over tp"),
    "a dim that is not there": (TIED, lambda p: with_parameter(p, NORM, stored_dim=1), NORM, None,
        "is stored sharded along dim 1, but has 1 dim"),
    "rows that tp does not divide": (TIED, lambda p: with_parameter(p, QUERY, shape=(127, 128)), QUERY, "tp",
        "tp shard dim 0 of 127 over 2 ranks"),
    "columns stored unevenly": (TIED, lambda p: with_parameter(p, QUERY, shape=(128, 127), stored_dim=1), QUERY,
        "dp_shard", "dp_shard shard the stored dim 1 of 127 over 2 ranks"),
    "a style of nothing": (TIED,
        lambda p: with_kind(p, "block", styles=(*p.kind("block").styles, ("ffn.gate_proj", COLUMN))), None, None,
        "style column of ffn.gate_proj matches no parameter of block"),
    "an output that is not reduced": (TIED,
        lambda p: with_kind(p, "block",
            styles=tuple((path, replace(one, kept=False)) for path, one in p.kind("block").styles)),
        None, None, "style column of attention.wq has kept = false"),
    "an axis that is not there": (TIED, lambda p: with_parameter(p, QUERY, work=("dp_replicate", "dp_shard", "ep")),
        QUERY, "ep", "names ep, which the mesh does not have"),
    "no state for a role": (TIED, lambda p: with_parameter(p, QUERY, role="adapter"), QUERY, None,
        "has role adapter, whose update occurs 0 times"),
    "a role updated twice": (TIED,
        lambda p: replace(p, optimizer=replace(p.optimizer, updates=p.optimizer.updates * 2)), "embed/embed.weight",
        None, "has role embedding, whose update occurs twice"),
    "a state kept twice": (TIED, lambda p: with_update(p, states=ONE_STATE * 2), None, None, "duplicate states: m, m"),
    "a state with dims of a matrix for vectors": (TIED,
        lambda p: with_update(p, states=(OptimizerState("m", (1,), "float32"),)), "block/attention_norm.weight", None,
        "has 1 dim, but its state m has dims 1"),
    "whole matrices of vectors": (TIED, lambda p: with_update(p, whole=True), "block/attention_norm.weight", None,
        "has 1 dim, but adamw updates whole matrices"),
    "a buffer counted per rank": (ALL, lambda p: with_buffer(p, "block", summed=()), "block/router.counts", "tp",
        "tp ranks see different inputs, but its update is summed there 0 times"),
    "a buffer summed where ranks see the same": ({"tp": 2, "dp_shard": 2, "sequence_parallel": False},
        lambda p: with_buffer(p, "block", summed=("dp_shard", "tp")), "block/router.counts", "tp",
        "tp ranks see the same inputs, but its update is summed there once"),
    "a load counter of floats": (ALL, lambda p: with_buffer(p, "block", load=True), "block/router.counts", None,
        "load counter block/router.counts is float32 of shape [4]"),
    "a load counter of several dims": (ALL, lambda p: with_buffer(p, "block", load=True, dtype="int64", shape=(2, 2)),
        "block/router.counts", None, "load counter block/router.counts is int64 of shape [2, 2]"),
    "a load counter that is summed nowhere": (ALL,
        lambda p: with_buffer(p, "block", load=True, dtype="int64", summed=(), work=()), "block/router.counts",
        "dp_shard", "has dp_shard not in `work`"),
    "a buffer's work and sum left out": (ALL,
        lambda p: with_buffer(p, "block", summed=("dp_shard", "tp"), work=("dp_shard", "tp")), "block/router.counts",
        "dp_replicate", "has dp_replicate not in `work`"),
    "an auxiliary loss in parts": ({"tp": 2, "sequence_parallel": False},
        lambda p: with_kind(p, "block", auxiliary=(replace(p.kind("block").auxiliary[0], work=("tp",)),)), None, "tp",
        "the auxiliary loss balance is partial over tp"),
    "an auxiliary loss that cp divides, taken for all of it": ({"cp": 2, "tp": 2},
        lambda p: with_kind(p, "block", auxiliary=(replace(p.kind("block").auxiliary[0], work=()),)), None, "cp",
        "the auxiliary loss balance is partial over nothing"),
    "a stream that cp does not divide": ({"cp": 2, "tp": 2},
        lambda p: replace(p, edge=replace(p.edge, shards=(Shard(0, ("tp",)),))), None, "cp",
        "stream is not sharded over cp"),
    "traffic over an axis of one rank": (PLAIN,
        lambda p: with_kind(p, "embed", collectives=(replace(p.kind("embed").collectives[0], axes=("cp",)),)), None,
        "cp", "names cp, which has one rank"),
    "traffic that no style has": (PLAIN, lambda p: with_kind(p, "block", collectives=p.kind("block").collectives[1:]),
        None, "tp", "block calls all_reduce 1× in backward, but its styles imply 2×"),
    "reductions that no loss has": (PLAIN, lambda p: with_kind(p, "head",
        collectives=tuple(replace(one, forward=5 * bool(one.forward)) for one in p.kind("head").collectives)),
        None, "tp", "head calls all_reduce 5× in forward, but its styles imply 3×"),
    "a style twice": (TIED, lambda p: with_kind(p, "block", styles=p.kind("block").styles * 2), "attention_norm", None,
        "kinds[block].styles has 2 entries named attention_norm"),
    "a module gathered that is not there": (TIED,
        lambda p: with_kind(p, "head", styles=(*p.kind("head").styles, ("ffn", gather()))), None, None,
        "style gather of ffn matches no parameter of head"),
    "axes in another order": (TIED, lambda p: with_parameter(p, QUERY, work=("dp_shard", "dp_replicate")), QUERY,
        "dp_shard", "names dp_shard, dp_replicate, but mesh order is dp_replicate, dp_shard"),
    "masters in fewer bits": (TIED, lambda p: replace(p, masters="bfloat16"), None, None, "masters names 'bfloat16'"),
    "traffic of nothing": (PLAIN,
        lambda p: with_kind(p, "embed", collectives=(replace(p.kind("embed").collectives[0], elements=0),)), None, None,
        "all_reduce of 0 elements"),
    "a collective that is none": (PLAIN,
        lambda p: with_kind(p, "embed", collectives=(replace(p.kind("embed").collectives[0], op="ring"),)), None, None,
        "ring with purpose tensor"),
    "a view that forgets an axis": (TIED, lambda p: with_mesh_view(p, "fsdp", ("cp",)), None, "dp_shard",
        "dp_shard occurs 0 times in replicas and fsdp"),
    "a mesh without ranks": (TIED, lambda p: replace(p, mesh=replace(p.mesh, atoms=(*p.mesh.atoms[:-1], ("tp", 0)))),
        None, "tp", "tp has 0 ranks"),
    "nodes of other ranks": (TIED, lambda p: replace(p, mesh=replace(p.mesh, nodes=(0, 0, 1, 1))), None, None,
        "nodes of 4 ranks, on a mesh of 16"),
    "a kind of no name": (TIED, lambda p: with_stage(p, 0, before=("embeds",)), None, None, "names 'embeds'"),
    "a dtype that is none": (TIED, lambda p: replace(p, masters="fp32"), None, None, "masters names 'fp32'"),
    "another version": (TIED, lambda p: replace(p, format=1), None, None, "the plan has format 1"),
}  # fmt: skip


@pytest.mark.parametrize("base, plant, parameter, axis, words", FAULTS.values(), ids=FAULTS)
def test_faults_are_found(base, plant, parameter, axis, words):
    assert_found(base, plant, parameter, axis, words)
