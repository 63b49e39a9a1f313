"""Tests of `bench comm-loss`: figures and targets, and small trainings."""

from __future__ import annotations

import pytest

from meshwright_bench.comm.loss_cost import (
    four_bits_figures,
    recovered,
    train_all,
    two_bits_figures,
    validation_loss,
)
from tests.bench.tiny import by_name
from tests.helpers import small_corpus

LOSSES = {"exact": [2.0, 3.0], "int2": [2.2, 3.2], "loco2": [2.1, 3.05], "loco4": [2.004, 3.03]}


def test_figures_and_their_targets():
    assert recovered(LOSSES) == pytest.approx(0.625)
    figures = by_name([*two_bits_figures(LOSSES), *four_bits_figures(LOSSES)])
    assert figures["two_bits.recovered"].is_met and figures["two_bits.int2.loss_bits_per_byte"].value == pytest.approx(
        2.7
    )
    assert figures["two_bits.gap"].value == pytest.approx(0.08)
    over = figures["four_bits.over_exact"]
    assert over.value == pytest.approx(0.034 / 5) and over.is_met is False
    assert over.spread == (pytest.approx(0.002), pytest.approx(0.01))
    assert not {f.name: f for f in two_bits_figures({**LOSSES, "loco2": [2.2, 3.15]})}["two_bits.recovered"].is_met


@pytest.mark.slow
def test_each_method_trains_and_returns_its_loss(tmp_path):
    words = [*small_corpus(tmp_path), "mesh.dp_shard=2", "train.steps=3", "model.num_layers=1", "train.seq_len=32",
             "train.global_batch=4", "train.validation_samples=4", "train.sample_tokens=0"]  # fmt: skip
    told = []
    losses = train_all(("exact", "int2", "loco4"), [0], words, told.append)
    ((exact,), (few,), (with_feedback,)) = losses.values()
    assert validation_loss("exact", seed=0, words=words) == exact != few and with_feedback not in (exact, few)
    assert len(told) == 3 and "comm.gradients=loco4" in told[-1]
