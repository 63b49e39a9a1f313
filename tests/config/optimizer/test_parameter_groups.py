"""Learning rates and decay of single parameters, and schedules of a user's own."""

from __future__ import annotations

import pytest

from meshwright.config.resolve import group_settings, learning_rate
from meshwright.errors import ConfigError
from meshwright.plan.rules import load
from meshwright.prove.record.plain_optimizer import plain_learning_rate

SCHEDULES = "tests.optim.schedules"


def groups(*entries):
    return load(
        "llama-tiny", ["train.lr=0.1", "train.weight_decay=0.2", f"train.parameter_groups={list(entries)}"]
    ).train


def test_roles_and_globs_match_and_later_entries_win():
    train = groups(
        "embedding:lr=0.3", "*.attention.*:lr=0.4,weight_decay=0", "blocks.1.*:lr=0.5", "vector:weight_decay=1"
    )
    expected = {
        ("embed.weight", "embedding"): (0.3, 0.2),
        ("head.weight", "head"): (0.1, 0.2),
        ("blocks.0.attention.wq.weight", "matrix"): (0.4, 0.0),
        ("blocks.1.attention.wq.weight", "matrix"): (0.5, 0.0),
        ("blocks.1.ffn_norm.weight", "vector"): (0.5, 1.0),
        ("norm.weight", "vector"): (0.1, 1.0),
    }
    found = {key: group_settings(train, *key, num_dims=1 if key[1] == "vector" else 2) for key in expected}
    assert found == expected
    for num_dims in (1, 2, 3):
        found = group_settings(groups(), "norm.weight", "vector", num_dims=num_dims)
        assert found == (0.1, 0.0), "vectors don't decay, whatever their dims"


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("embedding", "is not lr=… or weight_decay=…"),
        ("embedding:", "an empty setting is not"),
        (":lr=1", "is not lr=…"),
        ("embedding:rate=1", "rate=1 is not lr=…"),
        ("embedding:lr=1,lr=2", "each at most once"),
        ("embedding:lr=fast", "could not convert"),
        ("embedding:lr=-1", "lr = -1 is negative"),
        ("embedding:lr=nan", "not finite"),
        ("experts:lr=1", "matches no parameter"),
        ("block.*:lr=1", "matches no parameter"),
    ],
)
def test_wrong_entries_are_named(entry, words):
    with pytest.raises(ConfigError) as caught:
        groups("head:lr=1", entry)
    assert words in caught.value.what and caught.value.fix.endswith("head:lr=1")


def test_an_own_schedule_is_the_rate_of_trainer_and_reference():
    train = load("llama-tiny", [f"train.lr_schedule={SCHEDULES}:inverse_square_root", "train.warmup_steps=10"]).train
    assert learning_rate(5, train) == train.lr / 2 and learning_rate(40, train) == train.lr / 2
    assert plain_learning_rate(40, train) == train.lr / 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("falls_below_zero", "gives -"),
        ("raises", "raises ValueError('no table') in step 1"),
        ("asks", "no attribute 'peak_lr'\") (it has lr, "),
        ("words", "gives '0.1' in step 1"),
        ("missing", "schedules has no missing"),
    ],
)
def test_a_wrong_schedule_fails_before_training(name, words):
    with pytest.raises(ConfigError) as caught:
        load("llama-tiny", [f"train.lr_schedule={SCHEDULES}:{name}"])
    assert words in caught.value.what and caught.value.where.endswith("train.lr_schedule")


def test_an_unknown_schedule_suggests_one():
    with pytest.raises(ConfigError) as caught:
        load("llama-tiny", ["train.lr_schedule=cosin"])
    assert caught.value.fix == "train.lr_schedule=cosine"


def test_momentum_without_effect_is_an_error():
    with pytest.raises(ConfigError, match="has no effect"):
        load("llama-tiny", ["train.momentum=0.8"])
    with pytest.raises(ConfigError, match="train.beta2 = 0.9 has no effect"):
        load("llama-tiny", ["train.beta2=0.9", "train.optimizer=sgd"])
    assert load("llama-tiny", ["train.momentum=0.8", "train.optimizer=muon", "train.beta2=0.9"]).train.momentum == 0.8
