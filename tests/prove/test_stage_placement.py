"""Stages of parameters, and how they are told."""

from __future__ import annotations

from meshwright.config.facts_for_family import model_facts
from meshwright.pipeline.split_layers import SharedParameter
from meshwright.plan.make_plan import make_plan
from meshwright.prove.placement import StagePlacement, stage_placement_of
from tests.prove.proofs import small_config

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
