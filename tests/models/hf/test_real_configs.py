"""Large published models are planned from their config.json alone, with the parameters that their makers state."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

from meshwright.config.facts_for_family import model_facts
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory import predict_memory
from meshwright.plan.rules import load
from meshwright.units import GIB
from tests.models.hf.real_configs import REAL, write_config

pytest.importorskip("transformers")

WORDS = ("train.seq_len=4096", "train.global_batch=2048", "train.num_microbatches=16", "train.precision=bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_a_plan_has_the_published_parameters(tmp_path: Path, name: str) -> None:
    real, folder = REAL[name], write_config(tmp_path, name)
    for layout in real.layouts:
        words = [f"model.config={folder}", f"data.cache_dir={tmp_path}/cache", *WORDS, *layout.split()]
        config = load("hf-tiny", words)
        assert model_facts(config).num_params() == pytest.approx(real.published, rel=0.003), real.counts
        plan = make_plan(config)
        if real.most_gib is not None:
            assert predict_memory(plan).total() < real.most_gib * GIB
        assert plan.mesh.num_ranks() == config.mesh.axes().num_ranks()
        layers = list(chain(*(range(*stage.layers) for stage in plan.stages)))
        assert layers == list(range(real.config["num_hidden_layers"]))
