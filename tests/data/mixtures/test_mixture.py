"""What a mixture says of itself: sources, weights, epochs, and the bytes of its tokens."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.data.mixtures.entries import BLOCK, ONE
from meshwright.data.mixtures.mixture import Mixture, describe, train_order, train_sizes, validation_shares
from meshwright.data.text_corpus import Corpus

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
