"""Trackers that don't exist are refused with one that does; the key that they replace names its successor."""

from __future__ import annotations

import pytest

from meshwright.errors import ConfigError
from tests.helpers import assert_every_fix_works, outcome


@pytest.mark.parametrize(
    ("value", "fix"),
    [("tensorbord", "train.trackers=tensorboard or train.trackers=[]"),
     ("mlflow", "train.trackers=[]"),
     ('["wandb","wandbb"]', "train.trackers=wandb"),
     ("package.module", "train.trackers=[]")],
)  # fmt: skip
def test_an_unknown_tracker(value, fix):
    words = [f"train.trackers={value}"]
    error = outcome(words)
    assert isinstance(error, ConfigError) and error.fix == fix and "command line" in error.where
    assert_every_fix_works(error, words)


def test_trackers_need_not_be_installed_to_plan():
    assert outcome(["train.trackers=no.such:Sink"]).train.trackers == ("no.such:Sink",)


def test_the_former_key_names_its_successor():
    error = outcome(["train.tensorboard=true"])
    assert error.what == "unknown key train.tensorboard" and error.fix.startswith("train.trackers=tensorboard in place")
    assert outcome(["train.trackers=tensorboard"]).train.trackers == ("tensorboard",)
