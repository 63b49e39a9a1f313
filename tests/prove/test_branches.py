"""What ordinary steps don't show: the learning rates of a whole run, and the end of an epoch."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.config.resolve import learning_rate
from meshwright.data import loader
from meshwright.data.sampler import WindowOrder
from meshwright.mesh.axes import Axes
from meshwright.plan.rules import load
from meshwright.prove import conclude as branches
from meshwright.prove.conclude import diagnose_branches
from meshwright.prove.record.evidence import Evidence, RankRecord
from meshwright.prove.record.plain_optimizer import plain_learning_rate
from tests.helpers import open_data
from tests.prove.proofs import (
    NUM_STEPS,
    data_of,
    records_of,
    small_config,
    small_dit_config,
    small_expert_config,
)

AXES = Axes(dp_shard=2)
SCHEDULES = (
    "train.steps=50 train.warmup_steps=7 train.min_lr_ratio=0.1",
    "train.steps=50 train.warmup_steps=7 train.lr_schedule=wsd train.decay_steps=13 train.min_lr_ratio=0.2",
    "train.steps=20 train.warmup_steps=3 train.lr_schedule=wsd train.decay_steps=0",
    "train.steps=5 train.warmup_steps=20",
    "train.steps=1 train.warmup_steps=0",
    "train.steps=7 train.warmup_steps=2 train.min_lr_ratio=0.0",
    "train.steps=2 train.warmup_steps=2",
)


def evidence(*norms):
    """Records of steps with these norms."""
    return Evidence(AXES, 1, tuple(RankRecord(steps=[{"grad_norm": norm} for norm in norms]) for _ in range(2)))


def found_in(config):
    return " / ".join(one.text for one in diagnose_branches(config, data_of(config), evidence(1.0)))


@pytest.mark.parametrize("words", SCHEDULES)
def test_the_closed_form_is_that_of_the_schedule(words):
    train = load("llama-tiny", words.split()).train
    for step in range(1, train.steps + 3):  # a proof may take more steps than the run
        assert learning_rate(step, train) == pytest.approx(plain_learning_rate(step, train), rel=1e-13, abs=0.0)


@pytest.mark.parametrize("make", [small_config, small_dit_config])
def test_nothing_is_found_where_nothing_is_wrong(make):
    assert found_in(make()) == ""


RIGHT = {
    "zb-v": (small_config, ("mesh.pp=2", "pipeline.schedule=zb-v", "model.num_layers=4", "train.num_microbatches=4")),
    "cp": (small_config, ("mesh.cp=2",)),
    # The first stage has a dense layer only.
    "experts": (small_expert_config, ("mesh.pp=2", "model.num_dense_layers=1", "train.num_microbatches=2")),
    "pictures": (small_dit_config, ("mesh.pp=2", "train.num_microbatches=2")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_right_layouts_skip_what_is_not_finite(gang, name):
    make, layout = RIGHT[name]
    config = make(*layout)
    records = records_of(gang, config, steps=NUM_STEPS)
    assert {what for record in records for what in record.nonfinite} == {"loss", "gradient"}
    assert not any(changed for record in records for changed in record.nonfinite.values())


def test_what_is_not_proved_is_said():
    config = small_config("train.max_grad_norm=100.0")
    data = open_data(config)
    assert not list(branches.unproved(config, data, evidence(1.0, 1.0)))
    [note] = branches.unproved(config, data, evidence(1.0))
    assert "clipping" in note and "--steps 2" in note
    assert not list(branches.unproved(small_config("train.max_grad_norm=0.5"), data, evidence(1.0)))


WRONG_RATE = "the schedule has the learning rate"
BROKEN = {
    "a rate": (branches, "learning_rate", lambda real:
        lambda step, train: real(step, train) * (1 + 0.01 * (step == 500)), ("in step 500", WRONG_RATE)),
    "all rates but the first": (branches, "learning_rate", lambda real:
        lambda step, train: real(step, train) * (step < 2), ("in step 2,", WRONG_RATE)),
    "an epoch that visits a window twice": (WindowOrder, "windows", lambda real: lambda self, samples:
        np.where((found := real(self, samples)) == 3, 4, found), ("epoch 1 leaves out 1 of",)),
    # The task reads the second epoch in the order of the first; the reference does not.
    "a task that stops at the end of an epoch": (loader.Loader, "host_batch", lambda real: lambda self, samples:
        real(self, np.arange(samples.start, samples.stop) % self.order.num_windows), ("first sample of the second",)),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_comes_after_the_steps_of_the_proof_is_compared(monkeypatch, name):
    owner, attribute, change, words = BROKEN[name]
    monkeypatch.setattr(owner, attribute, change(getattr(owner, attribute)))
    text = found_in(small_config())
    assert all(word in text for word in words), text
