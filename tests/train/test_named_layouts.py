"""The named layouts through the command: same samples, and losses of 20 steps equal to one process's."""

from __future__ import annotations

import json

import pytest

from tests.helpers import meshwright, small_corpus

pytestmark = pytest.mark.slow

TOLERANCE = 1e-9
LOSS = "loss_bits_per_byte"

LAYOUTS = {
    "one process": [],
    "tp 2, dp_shard 2": ["mesh.tp=2", "mesh.dp_shard=2"],
}


def test_named_layouts_train_alike(tmp_path):
    """The preset's model and sequences as they are, half its batch. `test_layouts` has all of these in float32 too."""
    words = ["llama-tiny", "train.steps=20", "train.sample_tokens=0", "train.validation_samples=16",
             "train.global_batch=8", "train.precision=float64",
             *small_corpus(tmp_path / "corpus", num_bytes=200_000)]  # fmt: skip
    found = {}
    for name, layout in LAYOUTS.items():
        done = meshwright("run", *words, *layout, "--out", tmp_path / name, timeout_s=300)
        assert done.returncode == 0, done.stderr
        found[name] = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    one = found["one process"]
    assert len(one) == 20 and one[-1][LOSS] < one[0][LOSS] - 0.5
    for name, lines in found.items():
        for line, expected in zip(lines, one, strict=True):
            assert line["samples"] == expected["samples"], name
            assert line[LOSS] == pytest.approx(expected[LOSS], rel=0, abs=TOLERANCE), (name, line["step"])
            assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=10 * TOLERANCE), (name, line["step"])
        assert lines[-1][f"validation_{LOSS}"] == pytest.approx(one[-1][f"validation_{LOSS}"], rel=0, abs=TOLERANCE)
