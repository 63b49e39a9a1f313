"""Every schedule computes the gradients of one process: with other axes, tied and untied, with uneven stages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import pytest

from meshwright.prove.report import render
from tests.helpers import quick_and_slow
from tests.prove.proofs import prove_with, record_few_steps, small_config

KINDS = ("f-then-b", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v", "v-half", "v-min")
ONE_STAGE_A_RANK = ("f-then-b", "1f1b", "zb-h1")
OTHER_AXES = {"dp_shard": ("mesh.dp_shard=2",), "tp": ("mesh.tp=2",), "HSDP": ("mesh.dp_replicate=2",)}


def _schedules() -> Iterator[tuple[str, int, str, str]]:
    """Each schedule on four ranks of its own or, in turn, on two beside one other axis; tied and untied."""
    axes = cycle(OTHER_AXES)
    for at, kind in enumerate(KINDS):
        pp, axis = (2, next(axes)) if at % 2 else (4, "alone")
        yield kind, pp, axis, "true" if at % 3 else "false"


def proof(gang, *words):
    config = small_config(*words)
    return prove_with(gang(config.mesh.axes().num_ranks()).run(record_few_steps, config), config)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "pp", "axis", "tied"), list(_schedules()))
def test_every_schedule_is_proved(gang, kind, pp, axis, tied):
    stages = pp if kind in ONE_STAGE_A_RANK else 2 * pp
    microbatches = 2 * pp
    result = proof(
        gang,
        *OTHER_AXES.get(axis, ()),
        f"mesh.pp={pp}",
        f"pipeline.schedule={kind}",
        f"train.num_microbatches={microbatches}",
        "train.global_batch=16",
        f"model.num_layers={stages}",
        f"model.tie_embeddings={tied}",
        "pipeline.poison=true",
    )
    assert result.passed, "\n".join(render(result))


UNEVEN = {
    "3 2 2 1": ("mesh.pp=4", "model.num_layers=8", "pipeline.layers_per_stage=[3,2,2,1]"),
    "an empty stage": (
        "mesh.pp=4",
        "model.num_layers=3",
        "pipeline.layers_per_stage=[1,0,1,1]",
        "pipeline.allow_empty_stages=true",
    ),
    "no layer first": (
        "mesh.pp=2",
        "model.num_layers=2",
        "pipeline.layers_per_stage=[0,2]",
        "pipeline.allow_empty_stages=true",
    ),
    "no layer last": (
        "mesh.pp=2",
        "model.num_layers=2",
        "pipeline.layers_per_stage=[2,0]",
        "pipeline.allow_empty_stages=true",
        "model.tie_embeddings=true",
    ),
}
EMPTY_WITHIN_A_RANK = ("mesh.pp=2", "model.num_layers=2", "pipeline.allow_empty_stages=true")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"),
    quick_and_slow(zip(UNEVEN, cycle(("1f1b", "zb-h1")), strict=False), {("an empty stage", "zb-h1")}),
)
def test_uneven_and_empty_stages_are_proved(gang, name, kind):
    batch = ("train.num_microbatches=4", "train.global_batch=8", "pipeline.poison=true")
    words = [*UNEVEN[name], f"pipeline.schedule={kind}", *batch]
    result = proof(gang, *words)
    assert result.passed, "\n".join(render(result))


def test_an_empty_stage_that_hands_over_within_its_rank_is_proved(gang):
    """What it was sent must not be handed on in its slot, which the next receive overwrites."""
    words = ["pipeline.schedule=zb-v", "pipeline.layers_per_stage=[0,1,0,1]", *EMPTY_WITHIN_A_RANK]
    result = proof(gang, *words, "train.num_microbatches=4", "train.global_batch=8", "pipeline.poison=true")
    assert result.passed, "\n".join(render(result))


MORE = {
    "full recompute, split backward": ("recompute.policy=full", "pipeline.schedule=zb-h1"),
    "without release": ("pipeline.release=false",),
    "kept gathered, split backward": ("mesh.dp_shard=2", "mesh.reshard_after_forward=false", "pipeline.schedule=zb-h1"),
    "whole sequences": ("mesh.tp=2", "mesh.sequence_parallel=false"),
    "fewer micro-batches than stages": ("train.num_microbatches=1",),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_options_are_proved(gang, name):
    words = ["mesh.pp=2", "train.num_microbatches=4", "train.global_batch=8", "model.num_layers=2", *MORE[name]]
    result = proof(gang, *words)
    assert result.passed, "\n".join(render(result))


def test_recompute_without_a_pipeline_is_proved(gang):
    result = proof(gang, "recompute.policy=full", "mesh.dp_shard=2")
    assert result.passed, "\n".join(render(result))


def test_a_table_from_a_file_is_proved(gang, tmp_path):
    """Any order that `verify` takes: here the second micro-batch's backward comes first."""
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0B1,0B0\n1F0,1F1,1I1,1W1,1B0\n")
    result = proof(gang, "mesh.pp=2", f"pipeline.schedule={path}", "train.num_microbatches=2", "train.global_batch=8")
    assert result.passed, "\n".join(render(result))
