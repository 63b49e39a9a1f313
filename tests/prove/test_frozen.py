"""Frozen parameters: what is left trains as one process trains it, and what is frozen keeps its bits."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
import torch

from tests.prove.proofs import assert_proved, records_of, small_config, small_dit_config

FOUR = "train.num_microbatches=4 model.num_layers=4"
ZB_V = "mesh.pp=2 pipeline.schedule=zb-v"
EMBEDDERS = ("time_embed.*", "label_embed.*")
CASES = {
    "one process": ("", EMBEDDERS),
    "chunks, what the first stage has": ("pipeline.chunks=2", ("embed.*", "blocks.0.*", *EMBEDDERS)),
    "chunks, all but a bias of the first stage": (
        "pipeline.chunks=2", ("final.*", "blocks.*", "*embed.*eight", "time_embed.*")),
    "pp, chunks, one embedder": ("mesh.pp=2 pipeline.chunks=2", ("label_embed.weight",)),
    "pp, chunks, all but the first stage": ("mesh.pp=2 pipeline.chunks=2", ("final.*", "blocks.[123].*")),
    "pp, dp_shard, kept gathered, what the first rank has": (
        "mesh.pp=2 mesh.dp_shard=2 mesh.reshard_after_forward=false",
        ("embed.*", "blocks.0.*", "blocks.1.*", *EMBEDDERS)),
    "pp, zb-v, all matrices": (ZB_V, ("*.weight",)),
    "pp, zb-h1, recompute, some blocks": (
        "mesh.pp=2 pipeline.schedule=zb-h1 recompute.policy=full", ("blocks.1.*", "blocks.2.*")),
    "dp_shard": ("mesh.dp_shard=2", EMBEDDERS),
    # No layer of the first stage takes the condition: its embedders are trained by the other stages alone.
    "a first stage that trains only what it does not read": (
        "mesh.pp=2 pipeline.layers_per_stage=[0,4] pipeline.allow_empty_stages=true", ("embed.*",)),
    "tied, the embedding": (f"{ZB_V} model.tie_embeddings=true", ("embed.weight",)),
    "tied, all else": (f"{ZB_V} model.tie_embeddings=true", ("blocks.*", "norm.weight")),
}  # fmt: skip
QUICK = "pp, chunks, one embedder"
"""Sharded besides: `test_right_layouts`."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == QUICK else pytest.mark.slow) for n in CASES])
def test_what_is_left_is_proved_and_what_is_frozen_is_kept(gang, name):
    layout, globs = CASES[name]
    make = small_config if "tied" in name else small_dit_config
    config = make(*layout.split(), *FOUR.split(), f"train.freeze={list(globs)}")
    records = records_of(gang, config)
    assert_proved(gang, config, records)
    seen = set()
    for record in records:
        gradients = record.steps[0]["gradients"]
        for name, (_, last) in record.steps[-1]["weights"].items():
            is_frozen = any(fnmatchcase(name, glob) for glob in globs)
            seen.add(is_frozen)
            first = record.initial[name][1]
            assert torch.equal(first, last) == (is_frozen or not last.numel()), name
            assert (name in gradients) != is_frozen, name
    assert seen == {True, False}
