"""Every optimizer is proved on every kind of layout, and faults of theirs are named."""

from __future__ import annotations

import pytest

from meshwright.prove.report import render
from tests.gangs.gang import GangPool
from tests.prove.muon_faults import MUON, MUON_FAULTS, UNKNOWN_MUON_FAULTS
from tests.prove.proofs import assert_named, assert_proved, proof, small_config, small_expert_config

ZB_V = ("mesh.pp=2", "pipeline.schedule=zb-v", "train.num_microbatches=4", "model.num_layers=4")
GROUPS = "train.parameter_groups=['vector:weight_decay=0.3','blocks.1.*:lr=0.001','embedding:lr=0.02,weight_decay=0']"
LAYOUTS = {
    "muon on dp_shard 2": (MUON, "mesh.dp_shard=2"),
    "muon on dp_shard 3, uneven": (MUON, "mesh.dp_shard=3", "train.global_batch=6", "model.ffn_dim=25"),
    "muon on HSDP": (MUON, "mesh.dp_replicate=2", "mesh.dp_shard=2"),
    "muon on zb-v": (MUON, *ZB_V),
    "muon and groups on tp 2": (MUON, GROUPS, "mesh.tp=2"),
    "sgd on dp_shard 2": ("train.optimizer=sgd", "mesh.dp_shard=2"),
    "adamw and groups on pp 2, tied": (GROUPS, "mesh.pp=2", "model.tie_embeddings=true"),
    "an own one of whole matrices on dp_shard 2": ("train.optimizer=tests.optim.own:Whole", "mesh.dp_shard=2"),
}
QUICK = {"muon on dp_shard 2"}
SLOW = pytest.mark.slow


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else SLOW) for n in LAYOUTS])
def test_a_right_optimizer_is_proved(gang: GangPool, name: str) -> None:
    assert_proved(gang, small_config(*LAYOUTS[name]))


@pytest.mark.slow
def test_muon_of_experts_is_proved(gang: GangPool) -> None:
    assert_proved(gang, small_expert_config(MUON, "mesh.dp_shard=2", "mesh.ep=2"))


@pytest.mark.slow
@pytest.mark.parametrize("name", MUON_FAULTS)
def test_a_fault_of_muon_is_named(gang: GangPool, name: str) -> None:
    fault = MUON_FAULTS[name]
    config = small_config(*fault.layout)
    assert_named(proof(gang, config, "tests.prove.muon_faults", "MUON_FAULTS", name, few=True), fault)


@pytest.mark.slow
@pytest.mark.parametrize("name", UNKNOWN_MUON_FAULTS)
def test_an_unknown_fault_of_muon_is_caught(gang: GangPool, name: str) -> None:
    fault = UNKNOWN_MUON_FAULTS[name]
    result = proof(gang, small_config(*fault.layout), "tests.prove.muon_faults", "UNKNOWN_MUON_FAULTS", name, few=True)
    assert not result.passed and "not recognised" in " ".join(render(result))
