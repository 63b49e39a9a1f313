"""Experts on every layout compute what one device computes, and every seeded fault of theirs is named."""

from __future__ import annotations

import pytest

from meshwright.prove.report import render
from tests.gangs.gang import GangPool
from tests.helpers import quick_and_slow
from tests.prove.expert_faults import EXPERT_FAULTS, UNKNOWN_FAULTS
from tests.prove.proofs import assert_named, assert_proved, proof, small_expert_config
from tests.prove.seeded_faults import FAULTS

BY_LAYOUT = sorted(EXPERT_FAULTS, key=lambda name: EXPERT_FAULTS[name].layout)
"""Those of a layout come together: they share what they are compared with."""


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_LAYOUT)
def test_a_seeded_fault_is_caught_and_named(gang: GangPool, name: str) -> None:
    fault = EXPERT_FAULTS[name]
    config = small_expert_config(*fault.layout)
    result = proof(gang, config, "tests.prove.expert_faults", "EXPERT_FAULTS", name, few=True)
    assert_named(result, fault)


@pytest.mark.slow
@pytest.mark.parametrize("name", UNKNOWN_FAULTS)
def test_an_unknown_fault_gets_no_cause(gang: GangPool, name: str) -> None:
    fault = UNKNOWN_FAULTS[name]
    result = proof(
        gang, small_expert_config(*fault.layout), "tests.prove.expert_faults", "UNKNOWN_FAULTS", name, few=True
    )
    assert not result.passed and not result.known
    assert all(words in " ".join(" ".join(render(result)).split()) for words in fault.says)


def test_the_suite_is_large_enough() -> None:
    assert len(EXPERT_FAULTS) >= 25


DENSE = [name for name, fault in FAULTS.items() if "ffn" not in fault.at and "left out of the norm" not in fault.says][
    ::6
]
"""A sixth of them: they are those of tests/prove/test_seeded_faults.py, in a model with experts."""


@pytest.mark.slow
@pytest.mark.parametrize("name", DENSE)
def test_a_fault_of_other_parameters_keeps_its_cause(gang: GangPool, name: str) -> None:
    fault = FAULTS[name]
    ep = ("mesh.ep=2",) if "mesh.dp_shard=2" in fault.layout else ()
    result = proof(gang, small_expert_config(*fault.layout, *ep), "tests.prove.seeded_faults", "FAULTS", name, few=True)
    text = " ".join(" ".join(render(result)).lower().split())
    missing = [words for words in fault.says if words.lower() not in text]
    assert not missing, "\n".join([f"missing: {missing}", *render(result)])
    assert not result.known


EP = {
    "ep 2": ("mesh.dp_shard=2", "mesh.ep=2"),
    "ep 2 of dp_shard 4": ("mesh.dp_shard=4", "mesh.ep=2"),
    "ep 2, replicated": ("mesh.dp_replicate=2", "mesh.dp_shard=2", "mesh.ep=2"),
}
TP = {"tp 1": (), "tp 2": ("mesh.tp=2",), "tp 2, whole sequences": ("mesh.tp=2", "mesh.sequence_parallel=false")}
PIPES = {
    "no pipeline": (),
    "zb-v": ("mesh.pp=2", "pipeline.schedule=zb-v", "model.num_layers=4"),
    "dualpipe-v": ("mesh.pp=2", "pipeline.schedule=dualpipe-v", "model.num_layers=4"),
}
ROUTING = {
    "balance loss": (),
    "of the global batch": ("model.balance_scope=global-batch", "model.z_loss=0.01"),
    "capacity": ("model.drop=over-capacity", "model.capacity_factor=1.0"),
    "bias": ("model.balance_bias=true", "model.bias_rate=0.05", "model.balance_loss=0", "model.num_shared_experts=1"),
    "sigmoid, groups": (
        "model.score=sigmoid",
        "model.num_groups=4",
        "model.top_groups=2",
        "model.balance_bias=true",
        "model.bias_rate=0.05",
        "model.route_scale=2.5",
        "model.num_dense_layers=1",
    ),
}
RUNS = {
    "recomputed": ("recompute.policy=full",),
    "exact-via-all-to-all": ("comm.gradients=exact-via-all-to-all",),
    "frozen experts, kept gathered": (
        'train.freeze=["blocks.*.moe.experts.*"]', "mesh.reshard_after_forward=false",
    ),
}  # fmt: skip
QUICK = ("ep 2", "tp 1", "no pipeline", "sigmoid, groups", "recomputed", 4)
CASES = [
    QUICK,
    ("ep 2 of dp_shard 4", "tp 1", "no pipeline", "balance loss", "exact-via-all-to-all", 4),
    # The load of the global batch is that of one micro-batch.
    ("ep 2, replicated", "tp 1", "no pipeline", "of the global batch", "frozen experts, kept gathered", 1),
    ("ep 2", "tp 2", "no pipeline", "bias", "recomputed", 1),
    ("ep 2", "tp 2, whole sequences", "no pipeline", "capacity", "exact-via-all-to-all", 1),
    ("ep 2", "tp 1", "zb-v", "bias", "frozen experts, kept gathered", 4),
    ("ep 2", "tp 1", "dualpipe-v", "capacity", "recomputed", 4),
]
"""Each value of each factor; on at most 4 ranks."""


@pytest.mark.parametrize(("ep", "tp", "pipe", "routing", "run", "microbatches"), quick_and_slow(CASES, [QUICK]))
def test_a_right_layout_is_proved(
    gang: GangPool, ep: str, tp: str, pipe: str, routing: str, run: str, microbatches: int
) -> None:
    config = small_expert_config(
        *EP[ep],
        *TP[tp],
        *ROUTING[routing],
        *PIPES[pipe],
        *RUNS[run],
        f"train.num_microbatches={microbatches}",
        "train.global_batch=16",
    )
    assert_proved(gang, config)
