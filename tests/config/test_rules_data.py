"""A mixture is well formed, and takes the place of a source."""

from __future__ import annotations

import pytest

from meshwright.errors import ConfigError
from tests.helpers import assert_every_fix_works, outcome

MIXED = "data.mixture=['0.7:web/*.jsonl','0.3:stdlib']"


def test_sources_need_not_exist_to_plan():
    assert outcome([MIXED]).data.mixture == ("0.7:web/*.jsonl", "0.3:stdlib")
    assert outcome(["data.mixture=1:stdlib"]).data.mixture == ("1:stdlib",)


@pytest.mark.parametrize("value", ["stdlib", "['1:a','0:b']", "['1:a','1:a']", "['1:a','1e-9:b']"])
def test_a_malformed_mixture(value):
    error = outcome([f"data.mixture={value}"])
    assert isinstance(error, ConfigError) and error.where == "command line, data.mixture" and error.rule and error.fix


def test_a_source_beside_a_mixture():
    words = [MIXED, "data.source=a/*.txt"]
    error = outcome(words)
    assert isinstance(error, ConfigError) and "data.mixture is set too" in error.what
    assert error.where == "command line, data.source" and "'<weight>:a/*.txt' as an entry" in error.fix
    error.fix = error.fix.rpartition(" or ")[0]
    assert_every_fix_works(error, words)


def test_a_mixture_takes_the_place_of_a_presets_source():
    assert outcome([], "llama3-8b").data.source == "data/*.txt"
    config = outcome([MIXED], "llama3-8b")
    assert config.data.source == "stdlib" and config.data.mixture
    assert isinstance(outcome([MIXED, "data.source=data/*.txt"], "llama3-8b"), ConfigError)


@pytest.mark.parametrize("word", [MIXED, "data.validation_source=v", "data.when_exhausted=end"])
def test_images_have_none(word):
    error = outcome([word], "dit-digits")
    assert isinstance(error, ConfigError) and "has no effect" in error.what and "it applies to text" in error.rule
    assert_every_fix_works(error, [word], "dit-digits")
