"""A run on a mixture resumes on another layout with the same losses."""

from __future__ import annotations

import json

import pytest

from tests.helpers import small_corpus
from tests.train import runs

RATE = ("train.lr_schedule=wsd", "train.decay_steps=0", "train.warmup_steps=2")
"""A learning rate that doesn't depend on the number of steps."""


@pytest.mark.slow
def test_a_run_on_a_mixture_goes_on_with_another_layout(tmp_path):
    for name in ("first", "second"):
        small_corpus(tmp_path / name)
    lines = [json.dumps({"body": f"line {number} of a corpus\n" * 20}) for number in range(200)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    sources = [f"3:{tmp_path}/first/*.txt", f"1:{tmp_path}/lines.jsonl#body"]
    data = [f"data.mixture={json.dumps(sources)}", f"data.validation_source={tmp_path}/second/*.txt"]
    words = [*data, f"data.cache_dir={tmp_path}/cache", "data.packing=documents", "train.precision=float64", *RATE]
    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    runs.train(words, tmp_path / "whole")
    runs.train([*words, "train.steps=4"], tmp_path / "parts")
    runs.train([*words, "mesh.dp_shard=2"], tmp_path / "parts", resume="auto")
    whole, parts = runs.metrics(tmp_path / "whole"), runs.metrics(tmp_path / "parts")
    assert [line["samples"] for line in parts] == [line["samples"] for line in whole] and len(parts) == 8
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in parts] == pytest.approx([line[key] for line in whole], rel=1e-9)
    assert parts[-1]["validation_loss"] == pytest.approx(whole[-1]["validation_loss"], rel=1e-9)
