"""Frozen parameters: what is left trains as one process trains it, and what is frozen keeps its bits."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
import torch

from meshwright.prove.report import render
from tests.helpers import quick_and_slow
from tests.prove.proofs import few_pictures, prove_with, record_few_steps, small_config, small_dit_config

FOUR = ("train.num_microbatches=4", "model.num_layers=4")
LAYOUTS = {
    "one process": FOUR,
    "chunks": ("pipeline.chunks=2", *FOUR),
    "pp, chunks": ("mesh.pp=2", "pipeline.chunks=2", *FOUR),
    "pp, dp_shard, kept gathered": ("mesh.pp=2", "mesh.dp_shard=2", "mesh.reshard_after_forward=false", *FOUR),
    "pp, zb-v": ("mesh.pp=2", "pipeline.schedule=zb-v", *FOUR),
    "pp, zb-h1, recompute": ("mesh.pp=2", "pipeline.schedule=zb-h1", "recompute.policy=full", *FOUR),
    "dp_shard": ("mesh.dp_shard=2", *FOUR),
}
EMBEDDERS = ("time_embed.*", "label_embed.*")
GLOBS = {
    "all embedders": EMBEDDERS,
    "one embedder": ("label_embed.weight",),
    "some blocks": ("blocks.1.*", "blocks.2.*"),
    "all matrices": ("*.weight",),
    "what the first stage has": ("embed.*", "blocks.0.*", *EMBEDDERS),
    "what the first rank has": ("embed.*", "blocks.0.*", "blocks.1.*", *EMBEDDERS),
    "all but the first stage": ("final.*", "blocks.[123].*"),
    "all but a bias of the first stage": ("final.*", "blocks.*", "*embed.*eight", "time_embed.*"),
}
QUICK = {
    ("pp, chunks", "one embedder"),
}
"""Sharded besides: `test_dit`."""


def assert_proved_and_kept(gang, config):
    ranks, pictures = config.mesh.axes().num_ranks(), few_pictures(config)
    arguments = (config, pictures)
    records = gang(ranks).run(record_few_steps, *arguments) if ranks > 1 else [record_few_steps(0, 1, *arguments)]
    result = prove_with(records, config)
    assert result.passed, "\n".join(render(result))
    seen = set()
    for record in records:
        for name, (_, last) in record.parameters.items():
            is_frozen = any(fnmatchcase(name, glob) for glob in config.train.freeze)
            seen.add(is_frozen)
            first = record.initial[name][1]
            assert torch.equal(first, last) == (is_frozen or not last.numel()), name
            assert (name in record.gradients) != is_frozen, name
    assert seen == {True, False}


CASES = [
    ("one process", "all embedders"),
    ("chunks", "what the first stage has"),
    ("chunks", "all but a bias of the first stage"),
    *QUICK,
    ("pp, chunks", "all but the first stage"),
    ("pp, dp_shard, kept gathered", "what the first rank has"),
    ("pp, zb-v", "all matrices"),
    ("pp, zb-h1, recompute", "some blocks"),
    ("dp_shard", "all embedders"),
]


@pytest.mark.parametrize(("layout", "what"), quick_and_slow(CASES, QUICK))
def test_what_is_left_is_proved(gang, layout, what):
    assert_proved_and_kept(gang, small_dit_config(*LAYOUTS[layout], f"train.freeze={list(GLOBS[what])}"))


@pytest.mark.slow
def test_a_first_stage_that_trains_only_what_it_does_not_read(gang):
    """It has no layer, so nothing there takes the condition: its embedders are trained by the other stages alone."""
    layout = ("mesh.pp=2", "pipeline.layers_per_stage=[0,4]", "pipeline.allow_empty_stages=true")
    assert_proved_and_kept(gang, small_dit_config(*layout, *FOUR, "train.freeze=embed.*"))


@pytest.mark.slow
@pytest.mark.parametrize("freeze", ["embed.weight", "['blocks.*','norm.weight']"])
def test_a_llama_with_a_tied_embedding(gang, freeze):
    words = ("mesh.pp=2", "pipeline.schedule=zb-v", "model.tie_embeddings=true", f"train.freeze={freeze}")
    assert_proved_and_kept(gang, small_config(*words, *FOUR))
