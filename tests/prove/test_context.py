"""Context parallelism on every layout computes what one device computes, and every seeded fault of it is named."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from meshwright.config.schema import RunConfig
from meshwright.prove.compare.result import FaultKind
from meshwright.prove.report import to_json
from tests.gangs.gang import GangPool
from tests.helpers import quick_and_slow
from tests.prove.context_faults import CONTEXT_FAULTS, NEAR_MISSES
from tests.prove.proofs import assert_named, assert_proved, proof, small_config, small_expert_config

MODULE = "tests.prove.context_faults"


def config_of(layout: tuple[str, ...], documents: list[str]) -> RunConfig:
    return small_config(*layout, *(documents if "data.packing=documents" in layout else ()))


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Many files shorter than a sample, of different lengths."""
    folder = tmp_path_factory.mktemp("documents")
    for number in range(400):
        words = " ".join(f"{(number * 37 + word) % 91}" for word in range(1 + number * number % 4))
        (folder / f"{number}.txt").write_text(words, "utf-8")
    return [f"data.source={folder}/*.txt"]


QUICK_FAULTS = {
    "the sum over cp is missing",
    "queries miss the keys of other ranks",
}


BY_LAYOUT = [(name,) for name in sorted(CONTEXT_FAULTS, key=lambda name: CONTEXT_FAULTS[name].layout)]
"""Those of a layout come together: they share what they are compared with."""


@pytest.mark.parametrize("name", quick_and_slow(BY_LAYOUT, {(name,) for name in QUICK_FAULTS}))
def test_a_seeded_fault_is_caught_and_named(gang: GangPool, documents: list[str], name: str) -> None:
    fault = CONTEXT_FAULTS[name]
    assert_named(proof(gang, config_of(fault.layout, documents), MODULE, "CONTEXT_FAULTS", name, few=True), fault)


WITH_EXPERTS = ("the sum over cp is missing", "RoPE at local positions")


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_a_seeded_fault_is_named_beside_experts(gang: GangPool, name: str) -> None:
    fault = CONTEXT_FAULTS[name]
    config = small_expert_config(*fault.layout, "mesh.ep=2")
    assert_named(proof(gang, config, MODULE, "CONTEXT_FAULTS", name, few=True), replace(fault, at=""))


@pytest.mark.slow
@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_fault_of_something_else_is_not_blamed_on_cp(gang: GangPool, documents: list[str], name: str) -> None:
    fault = NEAR_MISSES[name]
    result = proof(gang, config_of(fault.layout, documents), MODULE, "NEAR_MISSES", name, few=True)
    assert_named(result, fault)
    causes = [
        one["cause"]
        for one in to_json(result, loss_unit="nats/token")["causes"]
        if one["kind"] != FaultKind.CONSEQUENCE.value
    ]
    assert causes and not any(re.search(r"\bcp\b", cause) for cause in causes)


def test_the_suite_is_large_enough() -> None:
    assert len(CONTEXT_FAULTS) >= 14 and len(NEAR_MISSES) >= 2 and set(CONTEXT_FAULTS) >= QUICK_FAULTS


CP = {
    f"{method} {size}": (f"mesh.cp={size}", f"mesh.cp_method={method}")
    for size in (2, 4)
    for method in ("ring", "heads")
}
MASKS = {
    "causal": (),
    "window": ("model.window=6", "model.global_every=2"),
    "documents": ("data.packing=documents",),
    "documents, window": ("data.packing=documents", "model.window=4"),
}
AXES = {
    "alone": (),
    "tp, whole sequences": ("mesh.tp=2", "mesh.sequence_parallel=false"),
    "replicas": ("mesh.dp_replicate=2",),
}
PIPES = {"no pipeline": (), "zb-v": ("mesh.pp=2", "pipeline.schedule=zb-v", "model.num_layers=4")}
RUNS = {
    "recomputed, kept gathered": ("recompute.policy=full", "mesh.reshard_after_forward=false"),
    "selectively recomputed": ("recompute.policy=selective",),
    "frozen": ('train.freeze=["embed.*", "blocks.0.*"]',),
}
QUICK = [
    ("heads 2", "window", "alone", "no pipeline", "frozen", 1),
]
CASES = [
    *QUICK,
    ("ring 2", "documents, window", "alone", "no pipeline", "recomputed, kept gathered", 4),
    ("ring 4", "causal", "alone", "no pipeline", "selectively recomputed", 1),
    ("ring 2", "window", "replicas", "no pipeline", "frozen", 1),
    ("ring 2", "documents", "alone", "zb-v", "selectively recomputed", 2),
    ("heads 2", "documents", "tp, whole sequences", "no pipeline", "selectively recomputed", 1),
    ("heads 2", "causal", "alone", "zb-v", "frozen", 2),
    ("heads 4", "documents, window", "alone", "no pipeline", "recomputed, kept gathered", 1),
]
"""Each method with each mask and with split backwards; on at most 4 ranks."""


@pytest.mark.parametrize(
    ("cp", "mask", "axes", "pipe", "run", "microbatches"),
    quick_and_slow(CASES, QUICK),
)
def test_a_right_layout_is_proved(
    gang: GangPool, documents: list[str], cp: str, mask: str, axes: str, pipe: str, run: str, microbatches: int
) -> None:
    heads = ("model.num_heads=8", "model.num_kv_heads=8") if "heads" in cp else ()
    batch = ("train.global_batch=16", f"train.num_microbatches={microbatches}")
    layout = (*CP[cp], *MASKS[mask], *AXES[axes], *PIPES[pipe], *RUNS[run], *heads, *batch)
    assert_proved(gang, config_of(layout, documents))


EXPERTS = {
    "ep over cp": ("mesh.cp=2", "mesh.ep=2"),
    "ep of dp_shard × cp": ("mesh.cp=2", "mesh.dp_shard=2", "mesh.ep=2"),
}
BALANCE = {
    "of samples": (),
    "of the global batch": ("model.balance_scope=global-batch",),
    "bias": ("model.balance_bias=true", "model.bias_rate=0.05", "model.balance_loss=0"),
}
MORE = {
    "z loss": ("model.z_loss=0.01", "recompute.policy=full"),
    "heads, window": (
        "mesh.cp_method=heads", "model.num_heads=4", "model.num_kv_heads=4", "model.window=6", "model.global_every=2",
    ),
    "documents": ("data.packing=documents",),
}  # fmt: skip
QUICK_EXPERTS = ("ep over cp", "of the global batch", "z loss")
EXPERT_CASES = [
    QUICK_EXPERTS,
    ("ep over cp", "bias", "documents"),
    ("ep of dp_shard × cp", "of samples", "heads, window"),
]


SELECTIVE = "recompute.policy=selective"
FOUR_STAGES = ("mesh.pp=2", "model.num_layers=4", "train.num_microbatches=4", "pipeline.schedule=dualpipe-v")
MORE_EXPERTS = {
    "ep inside cp 4": ("mesh.cp=4", "mesh.ep=2", "data.packing=documents"),
    "dualpipe-v, selective": ("mesh.cp=2", "mesh.ep=2", *FOUR_STAGES, SELECTIVE),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_EXPERTS)
def test_experts_are_proved_on_more_ranks_and_split_backwards(gang: GangPool, documents: list[str], name: str) -> None:
    """Layouts beside the cases below, with few of their other values."""
    words = MORE_EXPERTS[name]
    words = (*words, "train.global_batch=16", *(documents if "data.packing=documents" in words else ()))
    assert_proved(gang, small_expert_config(*words))


@pytest.mark.parametrize(("experts", "balance", "more"), quick_and_slow(EXPERT_CASES, [QUICK_EXPERTS]))
def test_experts_are_proved(gang: GangPool, documents: list[str], experts: str, balance: str, more: str) -> None:
    words = (*EXPERTS[experts], *BALANCE[balance], *MORE[more], "train.global_batch=16")
    words = (*words, *(documents if more == "documents" else ()))
    assert_proved(gang, small_expert_config(*words))
