"""What ordinary steps don't show: the learning rates of a whole run, and the end of an epoch."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.config.resolve import learning_rate
from meshwright.data.sampler import WindowOrder
from meshwright.mesh.axes import Axes
from meshwright.plan.rules import load
from meshwright.prove import conclude as branches
from meshwright.prove.conclude import diagnose_branches
from meshwright.prove.record.evidence import Evidence, RankRecord
from meshwright.prove.record.plain_optimizer import plain_learning_rate
from tests.helpers import open_data
from tests.prove.proofs import (
    Seed,
    few_pictures,
    record_on_rank,
    small_config,
    small_dit_config,
    small_expert_config,
)

AXES = Axes(dp_shard=2)
SCHEDULES = {
    "cosine": "train.steps=50 train.warmup_steps=7 train.min_lr_ratio=0.1",
    "wsd": "train.steps=50 train.warmup_steps=7 train.lr_schedule=wsd train.decay_steps=13 train.min_lr_ratio=0.2",
    "no decay": "train.steps=20 train.warmup_steps=3 train.lr_schedule=wsd train.decay_steps=0",
    "a run of its warm-up": "train.steps=5 train.warmup_steps=20",
    "one step": "train.steps=1 train.warmup_steps=0",
    "to zero": "train.steps=7 train.warmup_steps=2 train.min_lr_ratio=0.0",
    "no step after its warm-up": "train.steps=2 train.warmup_steps=2",
}


def evidence(*norms):
    """Records of steps with these norms."""
    return Evidence(AXES, 1, tuple(RankRecord(steps=[{"grad_norm": norm} for norm in norms]) for _ in range(2)))


def found_in(config):
    data = few_pictures(config) or open_data(config)
    return " / ".join(one.text for one in diagnose_branches(config, data, evidence(1.0)))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_closed_form_is_that_of_the_schedule(name):
    train = load("llama-tiny", SCHEDULES[name].split()).train
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
    pictures = few_pictures(config)
    records = gang(config.mesh.axes().num_ranks()).run(record_on_rank, config, Seed(), pictures)
    assert {what for record in records for what in record.nonfinite} == {"loss", "gradient"}
    assert not any(changed for record in records for changed in record.nonfinite.values())


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("in step 500", lambda step, rate: rate * 1.01 if step == 500 else rate),
        ("in step 2,", lambda step, rate: 0.0 if step > 1 else rate),
    ],
)
def test_a_rate_after_the_steps_of_the_proof(monkeypatch, words, change):
    monkeypatch.setattr(branches, "learning_rate", lambda step, train: change(step, learning_rate(step, train)))
    text = found_in(small_config())
    assert words in text and "the schedule has the learning rate" in text


def test_what_is_not_proved_is_said():
    config = small_config("train.max_grad_norm=100.0")
    data = open_data(config)
    assert not list(branches.unproved(config, data, evidence(1.0, 1.0)))
    [note] = branches.unproved(config, data, evidence(1.0))
    assert "clipping" in note and "--steps 2" in note
    assert not list(branches.unproved(small_config("train.max_grad_norm=0.5"), data, evidence(1.0)))


def test_an_epoch_that_visits_a_window_twice(monkeypatch):
    real = WindowOrder.windows

    def windows(self, samples):
        found = real(self, samples)
        return np.where(found == 3, 4, found)

    monkeypatch.setattr(WindowOrder, "windows", windows)
    assert "epoch 1 leaves out 1 of" in found_in(small_config())


def test_a_task_that_stops_at_the_end_of_an_epoch(monkeypatch):
    """The task reads the second epoch in the order of the first; the reference does not."""
    from meshwright.data import loader

    real = loader.Loader.host_batch

    def host_batch(self, samples):
        size = self.order.num_windows
        return real(self, np.arange(samples.start, samples.stop) % size)

    monkeypatch.setattr(loader.Loader, "host_batch", host_batch)
    assert "first sample of the second" in found_in(small_config())
