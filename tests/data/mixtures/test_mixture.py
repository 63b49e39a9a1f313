"""Mixtures: entries, weights, what one says of itself, and its bytes per token."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.mixtures.entries import BLOCK, ONE, Entry, parse_mixture, shares
from meshwright.data.mixtures.mixture import Mixture, describe, train_order, train_sizes, validation_shares
from meshwright.data.text_corpus import Corpus
from meshwright.errors import ConfigError

QUARTERS = (ONE // 4, 3 * ONE // 4)


def corpus_of(num_train, bytes_per_token=1.0, source="a", **more):
    tokens = np.zeros(num_train + 9, dtype=np.uint8)
    return Corpus(
        source, f"corpus {source}\n  packed", tokens[:num_train], tokens[:9], 256, bytes_per_token, source, **more
    )


def test_each_source_has_a_line_with_its_weight_and_epochs():
    mixture = Mixture((corpus_of(4 * BLOCK * 8 + 1), corpus_of(8 * 30 + 1, source="b")), QUARTERS, "")
    order = train_order(mixture, train_sizes(mixture, 8), 0)
    assert describe(mixture, order, num_samples=BLOCK).splitlines() == [
        "mixture of 2 sources",
        "  25.00%  corpus a; 0.062 epochs in this run",
        "          packed",
        "  75.00%  corpus b; 102 epochs in this run",
        "          packed",
    ]
    assert "corpus a; 1 epoch in this run" in describe(mixture, order, num_samples=16 * BLOCK)
    assert "corpus a; under 0.001 epochs" in describe(mixture, order, num_samples=8)


def test_bytes_per_token_are_those_of_the_validation_samples():
    mixture = Mixture((corpus_of(100, 2.0), corpus_of(100, 4.0)), QUARTERS, "")
    assert mixture.validation_bytes_per_token == pytest.approx(3.5)
    assert Mixture((corpus_of(100, 2.0), corpus_of(100, None)), QUARTERS, "").validation_bytes_per_token is None


def test_a_validation_source_stands_for_all():
    sources = tuple(corpus_of(100, source=name, validation_source="v") for name in "ab")
    assert validation_shares(Mixture(sources, QUARTERS, "")) == ((sources[0], ONE),)
    assert validation_shares(sources[0]) == ((sources[0], ONE),)


@pytest.mark.parametrize(("text", "entry"), [
    ("0.7:web/*.jsonl", Entry(Fraction(7, 10), "web/*.jsonl", None)),
    ("3:stdlib", Entry(Fraction(3), "stdlib", None)),
    ("1e-2:a.b:Source", Entry(Fraction(1, 100), "a.b:Source", None)),
    (".5:a.parquet#body", Entry(Fraction(1, 2), "a.parquet", "body")),
    ("1:a#b.txt#", Entry(Fraction(1), "a#b.txt", None)),
    ("1:saved dataset#the text", Entry(Fraction(1), "saved dataset", "the text")),
])  # fmt: skip
def test_an_entry_is_a_weight_a_source_and_a_field(text, entry):
    assert parse_mixture([text, "1:other"])[0] == entry


@pytest.mark.parametrize(("texts", "says"), [
    (["stdlib"], "'stdlib' has no weight"),
    (["x:stdlib"], "'x:stdlib' has no weight"),
    (["1e999999999:stdlib"], "has no weight"),
    (["nan:stdlib"], "has no weight"),
    (["0:stdlib"], "not above zero"),
    (["-0.5:stdlib"], "not above zero"),
    (["0.5:"], "has no source"),
    (["0.5:#text"], "has no source"),
    (["1:a", "2:b", "3:a"], "a is 2 of the sources"),
    (["1:a", "0.0001:b"], "the weight of b, 0.0001 of 1.0001, is too small"),
])  # fmt: skip
def test_what_is_no_entry(texts, says):
    with pytest.raises(ConfigError, match=says) as caught:
        parse_mixture(texts)
    assert caught.value.where == "data.mixture" and caught.value.rule and caught.value.fix


@pytest.mark.parametrize(("text", "fix"), [
    ("0.5:d/c.txt,0.5:d/a.jsonl", "\"data.mixture=['0.5:d/c.txt','0.5:d/a.jsonl']\""),
    ("d/c.txt:0.5", "0.5:d/c.txt in place of it"),
    ("d/c.txt:50%", "50:d/c.txt in place of it"),
    ("70%:d/c.txt", "70:d/c.txt in place of it"),
    ("d/c.txt", "0.5:d/c.txt, with the weight for 0.5, in place of it"),
])  # fmt: skip
def test_what_was_meant_is_suggested(text, fix):
    with pytest.raises(ConfigError) as caught:
        parse_mixture([text])
    assert caught.value.fix == fix
    first = fix.split("['")[1].split("'")[0] if "[" in fix else fix.split(" ")[0].rstrip(",")
    assert parse_mixture([first, "1:other"])


def test_a_source_may_occur_with_another_field():
    assert len(parse_mixture(["1:a.jsonl#title", "1:a.jsonl#body"])) == 2


@given(st.lists(st.fractions(1, 900), min_size=1, max_size=9), st.fractions(Fraction(1, 1000), 1000))
def test_shares_add_up_and_only_proportions_count(weights, factor):
    entries = [Entry(weight, str(at), None) for at, weight in enumerate(weights)]
    found = shares(entries)
    assert sum(found) == ONE
    assert shares([Entry(weight * factor, "", None) for weight in weights]) == found
    for weight, share in zip(weights, found, strict=True):
        assert abs(weight / sum(weights) * ONE - share) <= 1


def test_the_smallest_weight_that_is_suggested_works():
    with pytest.raises(ConfigError) as caught:
        parse_mixture(["1:a", "0.0001:b"])
    number = caught.value.fix.split()[5].rstrip(",")
    assert parse_mixture(["1:a", f"{number}:b"])
