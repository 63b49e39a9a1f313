"""Rules of sliding windows: keys that have no effect are refused, with fixes that work."""

from __future__ import annotations

import pytest

from meshwright.errors import ConfigError
from tests.helpers import assert_every_fix_works, outcome


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["model.global_every=2"], "model.global_every = 2 without model.window"),
        (["model.window=8", "model.global_every=9"], "no layer of 4 then attends to all earlier tokens"),
        (["model.window=8", "model.global_every=1"], "every layer of 4 then attends to all earlier tokens"),
    ],
)
def test_keys_without_effect_are_refused(words, what):
    error = outcome(words)
    assert isinstance(error, ConfigError) and what in error.what
    assert_every_fix_works(error, words)


def test_windows_are_accepted():
    assert not isinstance(outcome(["model.window=8", "model.global_every=4"]), Exception)
