"""Steps and ranks to profile: what the keys mean, and what is refused with a fix that works."""

from __future__ import annotations

import pytest

from meshwright.config.resolve import profiled_ranks, profiled_steps
from meshwright.errors import ConfigError
from meshwright.plan.rules import load
from tests.helpers import assert_every_fix_works, outcome


@pytest.mark.parametrize(
    ("value", "steps"),
    [
        ("[]", []),
        ("10", [range(10, 11)]),
        ("10-12", [range(10, 13)]),
        ("5,10-12", [range(5, 6), range(10, 13)]),
        ('["10-12","5"]', [range(5, 6), range(10, 13)]),
        ("3-5,6,4-8", [range(3, 9)]),
    ],
)
def test_steps_are_the_fewest_ranges_in_order(value, steps):
    assert profiled_steps(load(None, [f"train.profile={value}"]).train) == steps


def test_ranks_are_the_first_or_chosen_or_all():
    words = ["mesh.dp_shard=4", "train.profile=1"]
    assert profiled_ranks(load(None, words)) == [range(1)]
    assert profiled_ranks(load(None, [*words, "train.profile_ranks=0,2-3"])) == [range(1), range(2, 4)]
    assert profiled_ranks(load(None, [*words, "train.profile_ranks=all"])) == [range(4)]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["train.profile=0-3", "train.steps=500"], "train.profile names step 0, but train.steps = 500"),
        (["train.profile=5,490-501", "train.steps=500"], "train.profile names step 501, but train.steps = 500"),
        (["train.profile=1000000000000-2000000000000"], "names step 1000000000000"),
        (["train.profile=12-10"], "has the range 12-10, whose last step is before its first"),
        (["train.profile=first"], "train.profile has 'first'"),
        (["train.profile=true"], "train.profile has 'true'"),
        (["train.profile=5,"], "train.profile has ''"),
        (["train.profile=5", "train.profile_ranks=0-2", "mesh.pp=2"], "names rank 2, but the mesh has 2 ranks"),
        (["train.profile=5", "train.profile_ranks=every"], "train.profile_ranks has 'every'"),
        (["train.profile=5", "train.profile_ranks=[]"], "train.profile_ranks has ''"),
        (["train.profile_ranks=all"], "train.profile_ranks without train.profile has no effect"),
    ],
)
def test_wrong_entries_are_refused_with_a_fix_that_works(words, what):
    error = outcome(words)
    assert isinstance(error, ConfigError) and what in error.what
    assert_every_fix_works(error, words)
