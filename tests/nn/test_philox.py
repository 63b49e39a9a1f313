"""Philox gives its published vectors, and what the paper defines."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.nn.philox import philox
from tests.nn.dropout_add.cases import python_philox

KNOWN = [  # Random123 1.14, tests/kat_vectors: counter, key, output
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
WORD = st.integers(0, 2**32 - 1)


def torch_philox(counter, key):
    return tuple(int(word) for word in philox([torch.tensor([word]) for word in counter], key))


@pytest.mark.parametrize("vectors", KNOWN)
def test_philox_gives_the_known_answers(vectors):
    counter, key, output = (tuple(int(word, 16) for word in words.split()) for words in vectors)
    assert torch_philox(counter, key) == output == python_philox(counter, key)


@given(counter=st.tuples(WORD, WORD, WORD, WORD), key=st.tuples(WORD, WORD))
def test_philox_agrees_with_the_papers_definition(counter, key):
    assert torch_philox(counter, key) == python_philox(counter, key)
