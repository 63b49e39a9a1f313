"""Every seeded fault of a pipeline is caught, and the stage and micro-batch at fault are named."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from meshwright.config.facts_for_family import model_facts
from meshwright.pipeline.split_layers import SharedParameter
from meshwright.plan.make_plan import make_plan
from meshwright.prove.report import render
from meshwright.prove.stage_placement import StagePlacement, stage_placement_of
from tests.gangs.gang import GangError, GangPool
from tests.prove.pipeline_faults import LOUD_FAULTS, PIPELINE_FAULTS
from tests.prove.proofs import assert_named, proof, prove_with, record_on_rank, small_config

QUICK = {
    "two micro-batches are swapped on the way to stage 1",
    "a W is lost",
    "shared gradients are not added up",
}
"""Of most kinds one."""


def named(faults: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in faults]


def test_the_quick_ones_are_there() -> None:
    assert set(PIPELINE_FAULTS) >= QUICK and len(PIPELINE_FAULTS) >= 20


@pytest.mark.parametrize("name", named(PIPELINE_FAULTS))
def test_a_seeded_fault_is_caught_and_named(gang: GangPool, name: str) -> None:
    fault = PIPELINE_FAULTS[name]
    found = proof(
        gang,
        small_config(*fault.layout),
        "tests.prove.pipeline_faults",
        "PIPELINE_FAULTS",
        name,
        second_pass=True,
        few=True,
    )
    assert_named(found, fault)


@pytest.mark.parametrize("name", named(LOUD_FAULTS))
def test_a_buffer_that_is_used_after_its_free_ends_the_step(gang: GangPool, name: str) -> None:
    fault = LOUD_FAULTS[name]
    config = small_config(*fault.layout)
    with pytest.raises(GangError) as caught:
        gang(2).run(record_on_rank, config, "tests.prove.pipeline_faults", "LOUD_FAULTS", name)
    assert caught.value.ranks[0] == 1 and all(words in caught.value.what for words in fault.says)


def test_a_table_with_micro_batches_in_another_order_is_no_fault(gang: GangPool, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F1,0F0,0B1,0B0\n1F1,1B1,1F0,1B0\n")
    layout = ("mesh.pp=2", f"pipeline.schedule={path}", "train.num_microbatches=2", "train.global_batch=8")
    config = small_config(*layout)
    result = prove_with(gang(2).run(record_on_rank, config, "", "", ""), config)
    assert result.passed, "\n".join(render(result))


LAYERS = (range(3), range(3, 5), range(5, 5), range(5, 12))
HOLDERS = {f"blocks.{layer}.{name}": (stage,) for stage, layers in enumerate(LAYERS) for layer in layers
           for name in ("x", "ffn.up.weight")}  # fmt: skip
VEE = StagePlacement((0, 1, 1, 0), LAYERS, {**HOLDERS, "norm.weight": (3,), "head.weight": (3,)},
             (SharedParameter("embed.weight", ((0, "embed.weight"), (3, "head.weight"))),))  # fmt: skip


def test_stages_of_parameters() -> None:
    where = {"embed.weight": (0, 3), "blocks.2.ffn.up.weight": (0,), "blocks.4.x": (1,), "blocks.11.x": (3,)}
    assert {name: VEE.stages_with(name) for name in where} == where
    assert VEE.stages_with("norm.weight") == VEE.stages_with("head.weight") == (3,)
    assert VEE.stages_with_any(["blocks.0.x", "blocks.3.x", "blocks.4.x"]) == (0, 1)


def test_stages_in_words() -> None:
    assert VEE.describe([1]) == "stage 1 (pp rank 1)"
    assert VEE.describe([3, 0]) == "stages 0 and 3 (pp rank 0)"
    assert VEE.describe([0, 1, 2]) == "stages 0, 1 and 2 (pp ranks 0 and 1)"


def test_only_a_pipeline_has_stages() -> None:
    assert stage_placement_of(make_plan(small_config())) is None
    config = small_config("mesh.pp=2", "train.num_microbatches=4", "model.tie_embeddings=true")
    found = stage_placement_of(make_plan(config))
    assert found is not None and found.ranks == (0, 1) and found.layers == (range(1), range(1, 2))
    assert found.shared == (SharedParameter("embed.weight", ((0, "embed.weight"), (1, "head.weight"))),)
    assert sorted(found.holders) == sorted(model_facts(config).parameter_names())
    assert found.stages_with("norm.weight") == (1,) and found.stages_with("blocks.0.attention.wq.weight") == (0,)
    assert found.stages_with("embed.weight") == (0, 1)


def test_the_suite_is_large_enough() -> None:
    assert len(PIPELINE_FAULTS) >= 20
