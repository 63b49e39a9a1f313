"""The learning rate: warms up linearly, never leaves its bounds, ends where it should."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.config.load import load
from meshwright.config.resolve import learning_rate, notes_of
from meshwright.config.schema import TrainConfig

steps = st.integers(1, 300)
ratios = st.floats(0, 1)


@st.composite
def configs(draw, schedule):
    total = draw(steps)
    warmup = draw(st.integers(0, total))
    decay = draw(st.integers(0, total - warmup))
    return TrainConfig(steps=total, warmup_steps=warmup, decay_steps=decay, lr_schedule=schedule,
                       lr=draw(st.floats(1e-6, 10)), min_lr_ratio=draw(ratios))  # fmt: skip


either = st.one_of(configs("cosine"), configs("wsd"))


def rates(config):
    return [learning_rate(step, config) for step in range(1, config.steps + 1)]


@given(either)
def test_warm_up_is_linear_and_reaches_the_peak(config):
    found = rates(config)
    for step in range(1, config.warmup_steps + 1):
        assert found[step - 1] == pytest.approx(config.lr * step / config.warmup_steps, rel=1e-12)


@given(either)
def test_after_warm_up_it_only_falls_and_stays_between_its_bounds(config):
    found = rates(config)[config.warmup_steps :]
    assert all(a >= b * (1 - 1e-12) for a, b in zip(found, found[1:], strict=False))
    low, high = config.lr * config.min_lr_ratio, config.lr
    assert all(low * (1 - 1e-12) <= rate <= high * (1 + 1e-12) for rate in found)


@given(either)
def test_it_is_positive_unless_it_ends_at_nothing(config):
    assert all(math.isfinite(rate) and rate >= 0 for rate in rates(config))
    assert all(rate > 0 for rate in rates(config)[:-1])


@given(configs("cosine"))
def test_cosine_ends_at_the_smallest(config):
    if config.warmup_steps < config.steps:
        assert rates(config)[-1] == pytest.approx(config.lr * config.min_lr_ratio, rel=1e-9, abs=1e-15)


@given(either)
def test_past_the_end_it_stays_at_the_smallest(config):
    assert learning_rate(config.steps + 1, config) == pytest.approx(config.lr * config.min_lr_ratio, rel=1e-9)


@given(configs("wsd"))
def test_wsd_is_stable_and_then_decays_to_the_smallest(config):
    found = rates(config)
    stable = found[config.warmup_steps : config.steps - config.decay_steps]
    assert all(rate == pytest.approx(config.lr, rel=1e-12) for rate in stable)
    if config.decay_steps:
        assert found[-1] == pytest.approx(config.lr * config.min_lr_ratio, rel=1e-9, abs=1e-15)
        falls = [a - b for a, b in zip(found[-config.decay_steps - 1 :], found[-config.decay_steps :], strict=False)]
        if config.warmup_steps + config.decay_steps < config.steps:
            assert max(falls) - min(falls) <= config.lr * 1e-9  # in equal steps


def test_half_way_of_the_cosine_is_half_way_between_the_bounds():
    config = TrainConfig(steps=120, warmup_steps=20, lr=2.0, min_lr_ratio=0.5)
    assert learning_rate(70, config) == pytest.approx(1.5)


def test_a_warm_up_that_does_not_end_is_said():
    [note] = notes_of(load("llama-tiny", ["train.steps=5", "train.warmup_steps=20", "train.lr=1e-3"]))
    assert "only reaches 0.00025, not train.lr = 0.001" in note
    assert not list(notes_of(load("llama-tiny", ["train.steps=20", "train.warmup_steps=20"])))
